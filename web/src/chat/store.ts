// Conversations, kept in the browser (IndexedDB) and nowhere else.
import { signal } from "@preact/signals";
import { type IDBPDatabase, openDB } from "idb";
import { dropDraft } from "./drafts";
import * as sound from "./imported";
import { lastSettings, NO_SETTINGS, type Settings } from "./settings";
import { type Conversation, type Message, type Messages, subtree } from "./tree";

export interface Exported {
  format: "llamado-conversations";
  version: 1;
  conversations: { conversation: Conversation; messages: Message[] }[];
}

const VERSION = 1;
const TITLE_LENGTH = 60;

let store: Promise<IDBPDatabase> | undefined;

function database(): Promise<IDBPDatabase> {
  store ??= openDB("llamado", VERSION, {
    upgrade(db) {
      db.createObjectStore("conversations", { keyPath: "id" });
      db.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    },
  });
  return store;
}

/** All conversations, the one that was used last first. */
export const conversations = signal<Conversation[]>([]);
/** The conversation that is shown; null: a new one, which is kept with its first message. */
export const current = signal<Conversation | null>(null);
/** Whether the conversations, and the one that is shown, have been read. */
export const isRead = signal(false);
export const isOpen = signal(false);
/** Its messages by their ids. */
export const messages = signal<Messages>(new Map());

export function newId(): string {
  // randomUUID is there only where the page came by HTTPS or from this machine.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function sorted(all: Conversation[]): Conversation[] {
  return [...all].sort((a, b) => b.updated - a.updated);
}

export async function readConversations(): Promise<void> {
  const all = (await (await database()).getAll("conversations")) as Conversation[];
  // What was kept meanwhile is newer than what was read.
  const byId = new Map([...all, ...conversations.value].map((one) => [one.id, one]));
  conversations.value = sorted([...byId.values()]);
  isRead.value = true;
}

async function messagesOf(id: string): Promise<Message[]> {
  return (await (await database()).getAllFromIndex("messages", "conversation", id)) as Message[];
}

let asked: string | null | undefined; // undefined: nothing yet
let opening: Promise<void> = Promise.resolve();

/** Shows a conversation, at once, and its messages when they have been read; one that is not there is a new one. */
export function open(id: string | null): Promise<void> {
  if (id === asked && (current.value?.id ?? null) === id) return opening;
  asked = id;
  messages.value = new Map();
  current.value = conversations.value.find((one) => one.id === id) ?? null;
  isOpen.value = id === null;
  opening = id === null ? Promise.resolve() : read(id);
  return opening;
}

/** When what `open` was asked for is there. */
export async function opened(): Promise<void> {
  await opening.catch(() => undefined); // whoever opened it has said it
}

async function read(id: string): Promise<void> {
  const [all] = await Promise.all([messagesOf(id), current.value ? undefined : readConversations()]);
  if (asked !== id) return;
  current.value ??= conversations.value.find((one) => one.id === id) ?? null;
  // What was kept meanwhile is newer than what was read.
  messages.value = new Map([...all.map((one) => [one.id, one] as const), ...messages.value]);
  isOpen.value = true;
}

/** The first message's beginning, cut between two words. */
function titleOf(message: string): string {
  const line = message.replace(/\s+/g, " ").trim();
  if (line.length <= TITLE_LENGTH) return line || "New chat";
  const cut = line.slice(0, TITLE_LENGTH);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), TITLE_LENGTH / 2)).trimEnd()}…`;
}

/** Begins a conversation, and shows it, with what its first message says as its title. */
export async function create(firstMessage: string, settings: Settings): Promise<void> {
  const now = Date.now();
  const title = titleOf(firstMessage);
  const conversation: Conversation = { id: newId(), title, created: now, updated: now, leaf: null, settings };
  asked = conversation.id;
  messages.value = new Map();
  current.value = conversation;
  isOpen.value = true;
  await put(conversation);
}

async function put(conversation: Conversation): Promise<void> {
  if (current.value?.id === conversation.id) current.value = conversation;
  conversations.value = sorted([conversation, ...conversations.value.filter((one) => one.id !== conversation.id)]);
  await (await database()).put("conversations", conversation);
}

/** Changes the conversation that is shown. */
export async function change(changes: Partial<Omit<Conversation, "id">>): Promise<void> {
  if (current.value) await put({ ...current.value, ...changes });
}

/** Settings of the conversation that is shown, and of those that will be new. */
export async function changeSettings(changes: Partial<Settings>): Promise<void> {
  const settings = { ...shownSettings(), ...changes };
  lastSettings.value = settings;
  await change({ settings });
}

export function shownSettings(): Settings {
  return { ...NO_SETTINGS, ...(current.value?.settings ?? lastSettings.value) };
}

/** Keeps a message, of whichever conversation; `leaf`: the branch that ends with it is the one to show. */
export async function keep(message: Message, { leaf = true } = {}): Promise<void> {
  const kept = database().then((one) => one.put("messages", message));
  if (current.value?.id === message.conversation) messages.value = new Map(messages.value).set(message.id, message);
  const conversation = conversations.value.find((one) => one.id === message.conversation);
  if (leaf && conversation) await put({ ...conversation, leaf: message.id, updated: Date.now() });
  await kept;
}

/**
 * Saves a message that is still being written, and changes nothing that is shown. The transaction is committed at once, so
 * that it also completes when the page is being left. A failure is ignored: the finished message is saved again.
 */
export async function saveUnfinished(message: Message): Promise<void> {
  try {
    const transaction = (await database()).transaction("messages", "readwrite");
    void transaction.store.put(message).catch(() => undefined);
    transaction.commit();
    await transaction.done;
  } catch {
    // see above
  }
}

/** Removes a message and all that follows it; what is shown then ends before it. */
export async function removeMessage(message: Message): Promise<void> {
  const gone = subtree(messages.value, message.id);
  const left = new Map(messages.value);
  for (const id of gone) left.delete(id);
  messages.value = left;
  await change({ leaf: message.parent });
  const transaction = (await database()).transaction("messages", "readwrite");
  await Promise.all([...gone.map((id) => transaction.store.delete(id)), transaction.done]);
}

export async function removeConversation(id: string): Promise<void> {
  conversations.value = conversations.value.filter((one) => one.id !== id);
  dropDraft(id);
  if (current.value?.id === id) await open(null);
  const ids = (await messagesOf(id)).map((one) => one.id);
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  const store = transaction.objectStore("messages");
  await Promise.all([
    ...ids.map((one) => store.delete(one)),
    transaction.objectStore("conversations").delete(id),
    transaction.done,
  ]);
}

export async function rename(conversation: Conversation, title: string): Promise<void> {
  const renamed = { ...conversation, title: title.trim() || conversation.title };
  await put(renamed);
}

/** Ids of the conversations whose title or any message holds the text, whatever its case. */
export async function search(text: string): Promise<Set<string>> {
  const wanted = text.toLocaleLowerCase();
  const found = new Set<string>();
  for (const one of conversations.value) if (one.title.toLocaleLowerCase().includes(wanted)) found.add(one.id);
  const transaction = (await database()).transaction("messages");
  for await (const { value } of transaction.store) {
    const message = value as Message;
    if (!found.has(message.conversation) && message.content.toLocaleLowerCase().includes(wanted)) {
      found.add(message.conversation);
    }
  }
  return found;
}

export async function exported(ids: readonly string[]): Promise<Exported> {
  const wanted = conversations.value.filter((one) => ids.includes(one.id));
  return {
    format: "llamado-conversations",
    version: 1,
    conversations: await Promise.all(
      wanted.map(async (conversation) => ({ conversation, messages: await messagesOf(conversation.id) })),
    ),
  };
}

/** Takes what `exported` gave, under new ids; how many there were. Throws an Error for anything else. */
export async function imported(file: unknown): Promise<number> {
  const given = file as Partial<Exported> | null;
  if (given?.format !== "llamado-conversations" || given.version !== 1 || !Array.isArray(given.conversations)) {
    throw new Error("This file holds no conversations of llamado's.");
  }
  const fresh = given.conversations.map((one) => {
    const conversation = sound.conversation(one?.conversation);
    if (!Array.isArray(one.messages)) throw new Error("A conversation is incomplete.");
    const old = one.messages.map(sound.message);
    sound.checkTree(old);
    const ids = new Map(old.map((message) => [message.id, newId()]));
    const renewed = (id: string | null) => (id === null ? null : (ids.get(id) ?? null));
    const id = newId();
    return {
      conversation: { ...conversation, id, leaf: renewed(conversation.leaf) },
      messages: old.map((message) => ({
        ...message,
        id: renewed(message.id)!,
        conversation: id,
        parent: renewed(message.parent),
      })),
    };
  });
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  for (const { conversation, messages: all } of fresh) {
    void transaction.objectStore("conversations").put(conversation);
    for (const message of all) void transaction.objectStore("messages").put(message);
  }
  await transaction.done;
  await readConversations();
  return fresh.length;
}
