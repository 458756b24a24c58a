import "fake-indexeddb/auto";
import { beforeEach, expect, test, vi } from "vitest";

vi.stubGlobal("localStorage", { getItem: () => null, setItem: () => undefined, removeItem: () => undefined });
vi.stubGlobal("document", { baseURI: "http://server/", addEventListener: () => undefined });

interface Stored {
  text: string;
  revision: string;
}

/** The server's chats, with the rules of `/chats`. */
const server = { owner: "me", chats: new Map<string, Stored>(), deleted: new Set<string>() };
let counter = 0;

function put(id: string, text: string): Stored {
  const stored = { text, revision: `r${++counter}` };
  server.chats.set(id, stored);
  server.deleted.delete(id);
  return stored;
}

vi.stubGlobal("fetch", async (url: string, options: RequestInit) => {
  const id = new URL(url).pathname.split("/")[2];
  const headers = options.headers as Record<string, string>;
  const found = id ? server.chats.get(id) : undefined;
  if (!id) {
    const chats = [...server.chats].map(([id, { revision }]) => ({ id, revision, updated: 0, bytes: 1 }));
    return Response.json({ owner: server.owner, chats, deleted: [...server.deleted] });
  }
  if (options.method === "GET") return new Response(found!.text, { headers: { ETag: `"${found!.revision}"` } });
  const expected = headers["If-None-Match"] ? undefined : headers["If-Match"]?.replaceAll('"', "");
  if (found?.revision !== expected) return Response.json({ error: { message: "changed" } }, { status: 412 });
  if (options.method === "DELETE") {
    server.chats.delete(id);
    server.deleted.add(id);
    return Response.json({});
  }
  return Response.json({ revision: put(id, String(options.body)).revision });
});

const store = await import("./store");
const { synchronize } = await import("./remote");
const { followOwnChanges } = await import("./tabs");
const { noteChange } = await import("./remoteRecords");
const { NO_SETTINGS } = await import("./settings");

let noted: Promise<void>[] = [];
followOwnChanges(({ conversation }) => void noted.push(noteChange(conversation)));

async function exchange() {
  await Promise.all(noted);
  noted = [];
  await synchronize();
}

async function say(id: string, parent: string | null, content: string) {
  const message = { id, parent, content, conversation: store.current.value!.id, role: "user" as const, created: 1 };
  await store.saveMessage(message);
}

/** Let another device add a message to the current chat. */
function sayElsewhere(id: string, parent: string, content: string, updated = 5): void {
  const chat = store.current.value!.id;
  const whole = JSON.parse(server.chats.get(chat)!.text);
  whole.messages.push({ id, parent, content, conversation: chat, role: "user", created: 2 });
  put(chat, JSON.stringify({ ...whole, conversation: { ...whole.conversation, updated, leaf: id } }));
}

const titles = () => store.conversations.value.map((one) => one.title).sort();
const texts = () => [...store.messages.value.values()].map((one) => one.content).sort();
const onServer = (id: string) => JSON.parse(server.chats.get(id)!.text);

/** Start with one chat that browser and server have. */
beforeEach(async () => {
  for (const { id } of store.conversations.value) await store.removeConversation(id);
  await exchange();
  server.chats.clear();
  server.deleted.clear();
  await store.createConversation("Rivers", NO_SETTINGS);
  await say("q", null, "Rivers");
  await exchange();
});

test("sends a chat, and takes over what another device adds", async () => {
  const { id } = store.current.value!;
  expect(onServer(id).messages.map((one: { content: string }) => one.content)).toEqual(["Rivers"]);
  sayElsewhere("a", "q", "Ebro");
  await exchange();
  expect(texts()).toEqual(["Ebro", "Rivers"]);
  expect(store.current.value!.leaf).toBe("a");
  const { revision } = server.chats.get(id)!;
  await exchange();
  expect(server.chats.get(id)!.revision).toBe(revision);
});

test("keeps both states of a chat that two devices changed", async () => {
  const { id } = store.current.value!;
  sayElsewhere("b", "q", "Tajo");
  await say("c", "q", "Duero");
  await exchange();
  await exchange();
  expect(titles()).toEqual(["Rivers", "Rivers (other device)"]);
  expect(texts()).toEqual(["Duero", "Rivers"]); // changed later
  const copy = store.conversations.value.find((one) => one.id !== id)!;
  const words = [onServer(id), onServer(copy.id)].map((one) => one.messages.map((two: { content: string }) => two.content).sort());
  expect(words).toEqual([["Duero", "Rivers"], ["Rivers", "Tajo"]]);
});

test("makes no copy if one state contains the other", async () => {
  const { id } = store.current.value!;
  await say("d", "q", "Mundo");
  sayElsewhere("d", "q", "Mundo");
  sayElsewhere("e", "d", "Segura");
  await exchange();
  expect(titles()).toEqual(["Rivers"]);
  expect(texts()).toEqual(["Mundo", "Rivers", "Segura"]);
  expect(onServer(id).messages.length).toBe(3);
});

test("deletes a chat that another device deleted, unless it was changed here", async () => {
  const { id } = store.current.value!;
  server.chats.delete(id);
  server.deleted.add(id);
  await say("f", "q", "and?");
  await exchange();
  expect([titles(), [...server.chats.keys()]]).toEqual([["Rivers"], [id]]);
  server.chats.delete(id);
  server.deleted.add(id);
  await exchange();
  expect([titles(), store.current.value]).toEqual([[], null]);
});

test("deletes on the server what is deleted here, unless another device changed it", async () => {
  const { id } = store.current.value!;
  sayElsewhere("g", "q", "Turia");
  await store.removeConversation(id);
  await exchange();
  expect(titles()).toEqual(["Rivers"]);
  await store.removeConversation(id);
  await exchange();
  expect([titles(), server.chats.size]).toEqual([[], 0]);
});

test("a server that lost its folder gets the chats again", async () => {
  const { id } = store.current.value!;
  server.chats.clear();
  await exchange();
  expect([titles(), [...server.chats.keys()]]).toEqual([["Rivers"], [id]]);
});

test("replaces a damaged file of the server", async () => {
  const { id } = store.current.value!;
  server.chats.set(id, { text: "{", revision: "damaged" });
  await exchange();
  expect(onServer(id).conversation.title).toBe("Rivers");
});

test("chats of another API key are not sent", async () => {
  server.chats.clear();
  server.owner = "somebody else";
  await exchange();
  expect(server.chats.size).toBe(0);
  server.owner = "me";
});
