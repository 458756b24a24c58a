// Conversations, stored in the browser (IndexedDB) only.
import { signal } from "@preact/signals";
import { type IDBPDatabase, openDB } from "idb";
import { dropDraft } from "./drafts";
import * as validate from "./validate";
import { lastSettings, NO_SETTINGS, type Settings } from "./settings";
import { type Conversation, type Message, type Messages, subtree } from "./tree";

export interface ExportFile {
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

/** All conversations, the last used first. */
export const conversations = signal<Conversation[]>([]);
/** The current conversation; null for a new one, which is stored with its first message. */
export const current = signal<Conversation | null>(null);
/** True once the list of conversations is loaded; `isLoaded`: once the current conversation is. */
export const isListLoaded = signal(false);
export const isLoaded = signal(false);
/** Messages of the current conversation, by id. */
export const messages = signal<Messages>(new Map());

export function newId(): string {
  // randomUUID is missing on pages that came by plain HTTP from another machine.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function sortByLastUse(all: Conversation[]): Conversation[] {
  return [...all].sort((a, b) => b.updated - a.updated);
}

export async function readConversations(): Promise<void> {
  const all = (await (await database()).getAll("conversations")) as Conversation[];
  // Entries written meanwhile are newer than those read.
  const byId = new Map([...all, ...conversations.value].map((one) => [one.id, one]));
  conversations.value = sortByLastUse([...byId.values()]);
  isListLoaded.value = true;
}

async function messagesOf(id: string): Promise<Message[]> {
  return (await (await database()).getAllFromIndex("messages", "conversation", id)) as Message[];
}

let requested: string | null | undefined; // undefined: no conversation yet
let opening: Promise<void> = Promise.resolve();

/** Open a conversation: show it at once, and its messages once they are read. An unknown id opens a new conversation. */
export function openConversation(id: string | null): Promise<void> {
  if (id === requested && (current.value?.id ?? null) === id) return opening;
  requested = id;
  messages.value = new Map();
  current.value = conversations.value.find((one) => one.id === id) ?? null;
  isLoaded.value = id === null;
  opening = id === null ? Promise.resolve() : loadMessages(id);
  return opening;
}

/** Wait until the conversation of the last `open` is loaded. */
export async function whenLoaded(): Promise<void> {
  await opening.catch(() => undefined); // the caller of `open` handles the error
}

async function loadMessages(id: string): Promise<void> {
  const [all] = await Promise.all([messagesOf(id), current.value ? undefined : readConversations()]);
  if (requested !== id) return;
  current.value ??= conversations.value.find((one) => one.id === id) ?? null;
  // Messages written meanwhile are newer than those read.
  messages.value = new Map([...all.map((one) => [one.id, one] as const), ...messages.value]);
  isLoaded.value = true;
}

/** Return the first words of a message. */
function titleOf(message: string): string {
  const line = message.replace(/\s+/g, " ").trim();
  if (line.length <= TITLE_LENGTH) return line || "New chat";
  const cut = line.slice(0, TITLE_LENGTH);
  return `${cut.slice(0, Math.max(cut.lastIndexOf(" "), TITLE_LENGTH / 2)).trimEnd()}…`;
}

/** Create and open a conversation, with a title from its first message. */
export async function createConversation(firstMessage: string, settings: Settings): Promise<void> {
  const now = Date.now();
  const title = titleOf(firstMessage);
  const conversation: Conversation = { id: newId(), title, created: now, updated: now, leaf: null, settings };
  requested = conversation.id;
  messages.value = new Map();
  current.value = conversation;
  isLoaded.value = true;
  await saveConversation(conversation);
}

async function saveConversation(conversation: Conversation): Promise<void> {
  if (current.value?.id === conversation.id) current.value = conversation;
  conversations.value = sortByLastUse([conversation, ...conversations.value.filter((one) => one.id !== conversation.id)]);
  await (await database()).put("conversations", conversation);
}

/** Change the current conversation. */
export async function updateConversation(changes: Partial<Omit<Conversation, "id">>): Promise<void> {
  if (current.value) await saveConversation({ ...current.value, ...changes });
}

/** Change the settings of the current conversation and of future ones. */
export async function changeSettings(changes: Partial<Settings>): Promise<void> {
  const settings = { ...shownSettings(), ...changes };
  lastSettings.value = settings;
  await updateConversation({ settings });
}

export function shownSettings(): Settings {
  return { ...NO_SETTINGS, ...(current.value?.settings ?? lastSettings.value) };
}

/** Store a message of any conversation; `leaf`: show the branch that ends with it. */
export async function saveMessage(message: Message, { leaf = true } = {}): Promise<void> {
  const kept = database().then((one) => one.put("messages", message));
  if (current.value?.id === message.conversation) messages.value = new Map(messages.value).set(message.id, message);
  const conversation = conversations.value.find((one) => one.id === message.conversation);
  if (leaf && conversation) await saveConversation({ ...conversation, leaf: message.id, updated: Date.now() });
  await kept;
}

/**
 * Store a message that is still streaming, without changing the view. The transaction is committed at once, so that it
 * completes even while the user leaves the page. Failures are ignored: the finished message is stored again.
 */
export async function saveUnfinished(message: Message): Promise<void> {
  try {
    const transaction = (await database()).transaction("messages", "readwrite");
    void transaction.store.put(message).catch(() => undefined);
    transaction.commit();
    await transaction.done;
  } catch {
    // ignored, as described above
  }
}

/** Delete a message and everything below it, and show the branch that ends before it. */
export async function removeMessage(message: Message): Promise<void> {
  const gone = subtree(messages.value, message.id);
  const left = new Map(messages.value);
  for (const id of gone) left.delete(id);
  messages.value = left;
  await updateConversation({ leaf: message.parent });
  const transaction = (await database()).transaction("messages", "readwrite");
  await Promise.all([...gone.map((id) => transaction.store.delete(id)), transaction.done]);
}

export async function removeConversation(id: string): Promise<void> {
  conversations.value = conversations.value.filter((one) => one.id !== id);
  dropDraft(id);
  if (current.value?.id === id) await openConversation(null);
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
  await saveConversation(renamed);
}

/** Return the ids of conversations whose title or messages contain a text, ignoring case. */
export async function search(text: string): Promise<Set<string>> {
  const query = text.toLocaleLowerCase();
  const found = new Set<string>();
  for (const one of conversations.value) if (one.title.toLocaleLowerCase().includes(query)) found.add(one.id);
  const transaction = (await database()).transaction("messages");
  for await (const { value } of transaction.store) {
    const message = value as Message;
    if (!found.has(message.conversation) && message.content.toLocaleLowerCase().includes(query)) {
      found.add(message.conversation);
    }
  }
  return found;
}

export async function exportConversations(ids: readonly string[]): Promise<ExportFile> {
  const selected = conversations.value.filter((one) => ids.includes(one.id));
  return {
    format: "llamado-conversations",
    version: 1,
    conversations: await Promise.all(
      selected.map(async (conversation) => ({ conversation, messages: await messagesOf(conversation.id) })),
    ),
  };
}

/**
 * Import a file made by `exportConversations`, with new ids. Return the number of conversations. Throws an Error for any
 * other file.
 */
export async function importConversations(file: unknown): Promise<number> {
  const content = file as Partial<ExportFile> | null;
  if (content?.format !== "llamado-conversations" || content.version !== 1 || !Array.isArray(content.conversations)) {
    throw new Error("This file contains no conversations from llamado.");
  }
  const copies = content.conversations.map((one) => {
    const conversation = validate.conversation(one?.conversation);
    if (!Array.isArray(one.messages)) throw new Error("A conversation is incomplete.");
    const originals = one.messages.map(validate.message);
    validate.checkTree(originals);
    const ids = new Map(originals.map((message) => [message.id, newId()]));
    const newIdOf = (id: string | null) => (id === null ? null : (ids.get(id) ?? null));
    const id = newId();
    return {
      conversation: { ...conversation, id, leaf: newIdOf(conversation.leaf) },
      messages: originals.map((message) => ({
        ...message,
        id: newIdOf(message.id)!,
        conversation: id,
        parent: newIdOf(message.parent),
      })),
    };
  });
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  for (const { conversation, messages: all } of copies) {
    void transaction.objectStore("conversations").put(conversation);
    for (const message of all) void transaction.objectStore("messages").put(message);
  }
  await transaction.done;
  await readConversations();
  return copies.length;
}
