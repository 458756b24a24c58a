// Conversations, stored in the browser (IndexedDB).
import { computed, signal } from "@preact/signals";
import { labels } from "../text";
import * as database from "./database";
import { draftText, dropDraft, setDraftText } from "./drafts";
import { lastSettings, NO_SETTINGS, type Settings } from "./settings";
import { announce, followTabs } from "./tabs";
import { childrenByParent, type Conversation, type Message, type Messages, path, subtree } from "./tree";
import { conversationOf, forgetUnsaved, isAheadOfStorage, put, reasonUnsaved, retryUnsaved } from "./unsaved";

export { messagesOf } from "./database";

/** Most characters of a title. */
export const TITLE_LENGTH = 60;

/** All conversations, the last used first. */
export const conversations = signal<Conversation[]>([]);
/** The current conversation; null for a new one, which is stored with its first message. */
export const current = signal<Conversation | null>(null);
/** True once the list of conversations is loaded; `isLoaded`: once the current conversation is. */
export const isListLoaded = signal(false);
export const isLoaded = signal(false);
/** Why the current conversation is not stored; "" if it is. */
export const storageFailure = computed(() => {
  const reason = reasonUnsaved(current.value?.id);
  return reason ? labels.value.chat.notSaved(reason) : "";
});
/** Messages of the current conversation, by id. */
export const messages = signal<Messages>(new Map());
export const children = computed(() => childrenByParent(messages.value));
/** Messages of the current branch, in order. */
export const shownPath = computed(() => path(messages.value, current.value?.leaf ?? null));

export function newId(): string {
  // randomUUID is missing on pages that came by plain HTTP from another machine.
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function sortByLastUse(all: Conversation[]): Conversation[] {
  return [...all].sort((a, b) => b.updated - a.updated);
}

export async function readConversations(): Promise<void> {
  const all = await database.readAll();
  // Entries written meanwhile are newer than those read.
  const byId = new Map([...all, ...conversations.value].map((one) => [one.id, one]));
  conversations.value = sortByLastUse([...byId.values()]);
  isListLoaded.value = true;
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
  const [all] = await Promise.all([database.messagesOf(id), current.value ? undefined : readConversations()]);
  if (requested !== id) return;
  current.value ??= conversations.value.find((one) => one.id === id) ?? null;
  // Messages written meanwhile are newer than those read.
  messages.value = new Map([...all.map((one) => [one.id, one] as const), ...messages.value]);
  isLoaded.value = true;
}

/** Return the first words of a message, the first title of its conversation. */
export function titleOf(message: string): string {
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
  return settingsOf(current.value);
}

/** Return the settings of a conversation; null: of a new one. */
export function settingsOf(conversation: Conversation | null): Settings {
  return { ...NO_SETTINGS, ...(conversation?.settings ?? lastSettings.value) };
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
 * Store a message that is still streaming, without changing the view. Failures are ignored: the finished message is
 * stored again.
 */
export async function saveUnfinished(message: Message): Promise<void> {
  await database.putAtOnce(message).catch(() => undefined);
}

/** Restores what was deleted. */
export type Undo = () => Promise<void>;

/** Delete a message of the current conversation and everything below it, and show the branch that ends before it. */
export async function removeMessage(message: Message): Promise<Undo> {
  const gone = subtree(children.value, message.id).map((id) => messages.value.get(id)!);
  const left = new Map(messages.value);
  for (const { id } of gone) left.delete(id);
  const leaf = current.value!.leaf;
  messages.value = left;
  forgetUnsaved((one) => gone.some(({ id }) => id === one.id));
  await updateConversation({ leaf: message.parent });
  await database.deleteMessages(gone.map(({ id }) => id));
  announce({ conversation: message.conversation });
  await retryUnsaved();
  return async () => {
    const conversation = conversations.value.find((one) => one.id === message.conversation);
    if (conversation) await addConversations([{ conversation: { ...conversation, leaf }, messages: gone }]);
  };
}

export async function removeConversation(id: string): Promise<Undo> {
  const conversation = conversations.value.find((one) => one.id === id);
  conversations.value = conversations.value.filter((one) => one.id !== id);
  const draft = draftText(id);
  dropDraft(id);
  if (current.value?.id === id) await openConversation(null);
  const gone = await database.deleteConversation(id);
  forgetUnsaved((one) => conversationOf(one) === id);
  announce({ conversation: id });
  await retryUnsaved();
  return async () => {
    if (!conversation) return;
    setDraftText(id, draft);
    await addConversations([{ conversation, messages: gone }]);
  };
}

/** Change the title or the place of a conversation in the list. */
export async function changeConversation(conversation: Conversation, changes: Pick<Partial<Conversation>, "title" | "isPinned" | "folder">): Promise<void> {
  await saveConversation({ ...conversation, ...changes });
}

/** Return the ids of conversations whose title or messages contain a text, ignoring case. */
export async function search(text: string): Promise<Set<string>> {
  const query = text.toLocaleLowerCase();
  const found = await database.search(text);
  for (const one of conversations.value) if (one.title.toLocaleLowerCase().includes(query)) found.add(one.id);
  return found;
}

/** Store conversations with their messages, all or none, and show them. */
export async function addConversations(all: readonly database.WholeConversation[]): Promise<void> {
  await database.putAll(all);
  const ids = new Set(all.map(({ conversation }) => conversation.id));
  conversations.value = sortByLastUse([...all.map((one) => one.conversation), ...conversations.value.filter(({ id }) => !ids.has(id))]);
  for (const one of all) {
    if (one.conversation.id === current.value?.id) {
      current.value = one.conversation;
      messages.value = new Map([...messages.value, ...one.messages.map((message) => [message.id, message] as const)]);
    }
    announce({ conversation: one.conversation.id });
  }
}

/** Read a conversation that another tab or device changed. */
export async function rereadConversation(id: string): Promise<void> {
  const [stored, all] = await Promise.all([database.readConversation(id), current.value?.id === id ? database.messagesOf(id) : []]);
  const found = isAheadOfStorage(id) ? conversations.value.find((one) => one.id === id) : stored;
  conversations.value = sortByLastUse([...conversations.value.filter((one) => one.id !== id), ...(found ? [found] : [])]);
  if (current.value?.id !== id) return;
  current.value = found ?? null;
  const mine = [...messages.value.values()].filter((one) => isAheadOfStorage(one.id));
  messages.value = new Map([...all, ...mine].map((one) => [one.id, one]));
}

/** Show changes of other tabs. `onStreaming` gets the state of an answer that streams there. Called once. */
export function followOtherTabs(onStreaming: (conversation: string, message: Message | undefined) => void): void {
  followTabs(async ({ conversation, streaming }) => {
    if (!streaming) await rereadConversation(conversation);
    onStreaming(conversation, streaming);
  });
}
