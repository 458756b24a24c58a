// Conversations, stored in the browser (IndexedDB) only.
import { computed, signal } from "@preact/signals";
import { type IDBPDatabase, openDB } from "idb";
import { labels } from "../text";
import { dropDraft } from "./drafts";
import { lastSettings, NO_SETTINGS, type Settings } from "./settings";
import { type Conversation, type Message, type Messages, subtree } from "./tree";

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
/** Conversations and messages that the browser could not store, by id. */
const unsaved = signal<ReadonlyMap<string, { value: Conversation | Message; reason: string }>>(new Map());
/** Why the current conversation is not stored; "" if it is. */
export const storageFailure = computed(() => {
  const found = [...unsaved.value.values()].find(({ value }) => conversationOf(value) === current.value?.id);
  return found ? labels.value.chat.notSaved(found.reason) : "";
});
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

export async function messagesOf(id: string): Promise<Message[]> {
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
  if (line.length <= TITLE_LENGTH) return line || labels.value.chat.newChat;
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
  await put(conversation);
}

/** Store a conversation or message. A failure is shown to the user, who can go on with what is in memory. */
async function put(value: Conversation | Message): Promise<void> {
  try {
    await (await database()).put("conversation" in value ? "messages" : "conversations", value);
    forgetUnsaved((one) => one.id === value.id);
  } catch (error) {
    unsaved.value = new Map(unsaved.value).set(value.id, { value, reason: explainStorage(error) });
  }
}

function conversationOf(value: Conversation | Message): string {
  return "conversation" in value ? value.conversation : value.id;
}

function forgetUnsaved(isGone: (value: Conversation | Message) => boolean): void {
  const left = [...unsaved.value].filter(([, { value }]) => !isGone(value));
  if (left.length < unsaved.value.size) unsaved.value = new Map(left);
}

/** Try again to store what could not be stored. Called after space was freed. */
async function retryUnsaved(): Promise<void> {
  await Promise.all([...unsaved.value.values()].map(({ value }) => put(value)));
}

/** Return why the browser did not store something, and what to do. */
export function explainStorage(error: unknown): string {
  if (error instanceof DOMException && error.name === "QuotaExceededError") {
    return labels.value.chat.storageFull;
  }
  return labels.value.chat.storageFailed(error instanceof Error ? error.message : String(error));
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
  const kept = put(message);
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
  forgetUnsaved((one) => gone.includes(one.id));
  await updateConversation({ leaf: message.parent });
  const transaction = (await database()).transaction("messages", "readwrite");
  await Promise.all([...gone.map((id) => transaction.store.delete(id)), transaction.done]);
  await retryUnsaved();
}

export async function removeConversation(id: string): Promise<void> {
  conversations.value = conversations.value.filter((one) => one.id !== id);
  dropDraft(id);
  if (current.value?.id === id) await openConversation(null);
  const ids = (await messagesOf(id)).map((one) => one.id);
  forgetUnsaved((one) => conversationOf(one) === id);
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  const store = transaction.objectStore("messages");
  await Promise.all([
    ...ids.map((one) => store.delete(one)),
    transaction.objectStore("conversations").delete(id),
    transaction.done,
  ]);
  await retryUnsaved();
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

/** Store conversations with their messages, all or none. */
export async function addConversations(all: readonly { conversation: Conversation; messages: readonly Message[] }[]): Promise<void> {
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  const stored = all.flatMap(({ conversation, messages }) => [
    transaction.objectStore("conversations").put(conversation),
    ...messages.map((message) => transaction.objectStore("messages").put(message)),
  ]);
  await Promise.all([...stored, transaction.done]);
  await readConversations();
}
