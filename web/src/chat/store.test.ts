import "fake-indexeddb/auto";
import { beforeAll, expect, test, vi } from "vitest";

vi.stubGlobal("localStorage", { getItem: () => null, setItem: () => undefined });
const store = { ...(await import("./store")), ...(await import("./transfer")) };
const { NO_SETTINGS } = await import("./settings");

function message(id: string, parent: string | null, content: string) {
  return { id, parent, content, conversation: store.current.value!.id, role: "user" as const, created: Date.now() };
}

beforeAll(async () => {
  await store.createConversation("  Rivers\nof Spain ", { ...NO_SETTINGS, system: "short" });
  await store.saveMessage(message("q", null, "Rivers of Spain"));
  await store.saveMessage(message("a", "q", "Ebro"));
  await store.saveMessage(message("b", "q", "Tajo"));
});

test("reopens a conversation unchanged", async () => {
  const { id } = store.current.value!;
  await store.openConversation(null);
  expect([store.current.value, store.messages.value.size]).toEqual([null, 0]);
  await store.openConversation(id);
  expect(store.current.value).toMatchObject({ title: "Rivers of Spain", leaf: "b", settings: { system: "short" } });
  expect([...store.messages.value.keys()].sort()).toEqual(["a", "b", "q"]);
});

test("searches titles and messages", async () => {
  const { id } = store.current.value!;
  expect(await store.search("EBRO")).toEqual(new Set([id]));
  expect(await store.search("rivers of")).toEqual(new Set([id]));
  expect((await store.search("nothing of the kind")).size).toBe(0);
});

test("imports an exported file as copies", async () => {
  const before = store.conversations.value.map((one) => one.id);
  const file = JSON.stringify(await store.exportConversations(before));
  expect(await store.importConversations(file)).toBe(1);
  const copy = store.conversations.value.find((one) => !before.includes(one.id))!;
  await store.openConversation(copy.id);
  const { path } = await import("./tree");
  expect(path(store.messages.value, copy.leaf).map((one) => one.content)).toEqual(["Rivers of Spain", "Tajo"]);
  await expect(store.importConversations('{"format": "other"}')).rejects.toThrow("no chats");
  const loop = { id: "m", parent: "m", role: "user", content: "x" };
  for (const conversations of [3, [null], [{}], [{ conversation: { title: "x" }, messages: [null] }], [{ conversation: { title: "x" }, messages: [loop] }]]) {
    await expect(store.importConversations(JSON.stringify({ format: "llamado-conversations", version: 1, conversations }))).rejects.toThrow(/chat/);
  }
  await store.removeConversation(copy.id);
  expect(store.conversations.value.map((one) => one.id)).toEqual(before);
});

test("deletes a message with everything below it", async () => {
  await store.openConversation(store.conversations.value[0]!.id);
  await store.saveMessage(message("c", "b", "and?"));
  await store.removeMessage(store.messages.value.get("b")!);
  expect([...store.messages.value.keys()].sort()).toEqual(["a", "q"]);
  expect(store.current.value!.leaf).toBe("q");
});

test("stores a message in its own conversation while another is open", async () => {
  const { id } = store.current.value!;
  const late = message("late", "q", "Duero");
  await store.openConversation(null);
  await store.saveMessage(late);
  expect([store.current.value, store.messages.value.size]).toEqual([null, 0]);
  await store.openConversation(id);
  expect(store.current.value!.leaf).toBe("late");
  expect([...store.messages.value.keys()].sort()).toEqual(["a", "late", "q"]);
});

test("keeps messages stored while a conversation opens, and shows the last one requested", async () => {
  const { id } = store.current.value!;
  const newer = message("late", "q", "Guadiana");
  await store.openConversation(null);
  const opening = store.openConversation(id);
  expect([store.current.value!.id, store.isLoaded.value]).toEqual([id, false]);
  const keeping = store.saveMessage(newer);
  await Promise.all([opening, keeping]);
  expect(store.messages.value.get("late")!.content).toBe("Guadiana");
  await store.openConversation(null);
  const first = store.openConversation(id);
  await Promise.all([store.openConversation(null), first]);
  expect([store.current.value, store.messages.value.size, store.isLoaded.value]).toEqual([null, 0, true]);
});
