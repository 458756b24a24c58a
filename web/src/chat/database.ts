// Storage of conversations and messages in the browser (IndexedDB).
import { type IDBPDatabase, openDB } from "idb";
import type { Conversation, Message } from "./tree";

const VERSION = 1;

/** A conversation with all its messages. */
export interface WholeConversation {
  conversation: Conversation;
  messages: readonly Message[];
}

let opened: Promise<IDBPDatabase> | undefined;

function database(): Promise<IDBPDatabase> {
  opened ??= openDB("llamado", VERSION, {
    upgrade(db) {
      db.createObjectStore("conversations", { keyPath: "id" });
      db.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    },
  });
  return opened;
}

export async function readAll(): Promise<Conversation[]> {
  return (await (await database()).getAll("conversations")) as Conversation[];
}

export async function readConversation(id: string): Promise<Conversation | undefined> {
  return (await (await database()).get("conversations", id)) as Conversation | undefined;
}

export async function messagesOf(conversation: string): Promise<Message[]> {
  return (await (await database()).getAllFromIndex("messages", "conversation", conversation)) as Message[];
}

export async function put(value: Conversation | Message): Promise<void> {
  await (await database()).put("conversation" in value ? "messages" : "conversations", value);
}

/** Store a message and commit at once, so that the transaction completes even while the user leaves the page. */
export async function putAtOnce(message: Message): Promise<void> {
  const transaction = (await database()).transaction("messages", "readwrite");
  void transaction.store.put(message).catch(() => undefined);
  transaction.commit();
  await transaction.done;
}

/** Store conversations with their messages, all or none. */
export async function putAll(all: readonly WholeConversation[]): Promise<void> {
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  const stored = all.flatMap(({ conversation, messages }) => [
    transaction.objectStore("conversations").put(conversation),
    ...messages.map((message) => transaction.objectStore("messages").put(message)),
  ]);
  await Promise.all([...stored, transaction.done]);
}

export async function deleteMessages(ids: readonly string[]): Promise<void> {
  const transaction = (await database()).transaction("messages", "readwrite");
  await Promise.all([...ids.map((id) => transaction.store.delete(id)), transaction.done]);
}

/** Delete a conversation and its messages, which are returned. */
export async function deleteConversation(id: string): Promise<Message[]> {
  const messages = await messagesOf(id);
  const transaction = (await database()).transaction(["conversations", "messages"], "readwrite");
  const store = transaction.objectStore("messages");
  await Promise.all([
    ...messages.map((one) => store.delete(one.id)),
    transaction.objectStore("conversations").delete(id),
    transaction.done,
  ]);
  return messages;
}

/** Return the ids of the conversations with a message that contains a text, ignoring case. */
export async function search(text: string): Promise<Set<string>> {
  const query = text.toLocaleLowerCase();
  const found = new Set<string>();
  const transaction = (await database()).transaction("messages");
  for await (const { value } of transaction.store) {
    const message = value as Message;
    if (!found.has(message.conversation) && message.content.toLocaleLowerCase().includes(query)) found.add(message.conversation);
  }
  return found;
}
