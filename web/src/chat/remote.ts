// Exchange of the chats with a server that keeps them (`--chats`), so that all devices show the same. The browser's
// storage stays complete: without the server all chats can be used, and changes are exchanged later.
import { ApiFailure } from "../api/http";
import { labels } from "../text";
import * as database from "./database";
import { remoteFailure } from "./remoteFailure";
import { noteExchange, forgetRecord, readRecords, type SharedChat } from "./remoteRecords";
import { DAMAGED, deleteChat, getChat, listChats, putChat, type RemoteList } from "./remoteApi";
import { addConversations, rereadConversation } from "./store";
import { announceToTabs } from "./tabs";
import { isBusy } from "./tasks";
import { exportWhole, importWhole, withNewIds } from "./transfer";
import type { Message } from "./tree";

type Whole = database.WholeConversation;

/** Exchange all changes once. Throws ApiFailure if the server cannot be reached. */
export async function synchronize(): Promise<void> {
  const listing = await listChats();
  const records = await readRecords();
  const local = new Set((await database.readAll()).map((one) => one.id));
  const remote = new Map(listing.chats.map((one) => [one.id, one.revision]));
  const failures: string[] = [];
  for (const id of new Set([...remote.keys(), ...local, ...records.keys()])) {
    const record = records.get(id);
    if (isBusy(id) || (record?.owner && record.owner !== listing.owner)) continue;
    try {
      await exchange(id, { listing, record, revision: remote.get(id) ?? null, isHere: local.has(id) });
    } catch (error) {
      if (!(error instanceof Error) || (error instanceof ApiFailure && error.status === 0)) throw error;
      // Another device was faster (412): the next exchange finds its change.
      if (!(error instanceof ApiFailure && error.status === 412)) failures.push(error.message);
    }
  }
  remoteFailure.value = failures[0] ?? "";
}

interface State {
  listing: RemoteList;
  record: SharedChat | undefined;
  /** The server's revision; null: it does not have the chat. */
  revision: string | null;
  /** True if this browser has the chat. */
  isHere: boolean;
}

/** Exchange one chat. */
async function exchange(id: string, { listing, record, revision, isHere }: State): Promise<void> {
  const known = record?.revision ?? null;
  const isChanged = record ? record.change !== null : true;
  if (revision === null) {
    if (!isHere) return forgetRecord(id);
    const isDeleted = known !== null && listing.deleted.includes(id) && !isChanged;
    return isDeleted ? drop(id) : push(id, listing.owner, null);
  }
  if (!isHere) {
    if (known === revision && isChanged) {
      await deleteChat(id, revision);
      return forgetRecord(id);
    }
    return revision === DAMAGED ? undefined : pull(id, listing.owner);
  }
  if (revision === DAMAGED) return push(id, listing.owner, revision);
  if (known === revision) return isChanged ? push(id, listing.owner, revision) : undefined;
  return isChanged ? merge(id, listing.owner) : pull(id, listing.owner);
}

/** Send the state in this browser in place of the server's `revision`. */
async function push(id: string, owner: string, revision: string | null): Promise<void> {
  const change = (await readRecords()).get(id)?.change ?? null;
  const whole = await read(id);
  if (!whole) return;
  await noteExchange(id, owner, await putChat(id, await exportWhole(whole), revision), change);
}

/** Take over the server's state. */
async function pull(id: string, owner: string): Promise<void> {
  const change = (await readRecords()).get(id)?.change ?? null;
  const { chat, revision } = await getChat(id);
  await replace(importWhole(chat, id));
  await noteExchange(id, owner, revision, change);
}

/** Join the states of a chat that was changed here and on another device. If both have words of their own, keep both. */
async function merge(id: string, owner: string): Promise<void> {
  const mine = await read(id);
  const { chat, revision } = await getChat(id);
  const theirs = importWhole(chat, id);
  if (!mine || contains(theirs, mine)) return pull(id, owner);
  if (contains(mine, theirs)) return push(id, owner, revision);
  const isMineNewer = mine.conversation.updated > theirs.conversation.updated;
  const older = isMineNewer ? theirs : mine;
  const title = labels.value.chat.otherDevice(older.conversation.title);
  await addConversations([withNewIds({ ...older.conversation, title }, older.messages)]);
  return isMineNewer ? push(id, owner, revision) : pull(id, owner);
}

/** Return true if `a` has all words of `b`. */
function contains(a: Whole, b: Whole): boolean {
  const words = new Set(a.messages.map(wordsOf));
  return b.messages.every((one) => words.has(wordsOf(one)));
}

function wordsOf({ id, parent, content, reasoning, toolCalls, attachments }: Message): string {
  return JSON.stringify([id, parent, content, reasoning ?? "", toolCalls ?? [], (attachments ?? []).map((one) => one.name)]);
}

async function read(id: string): Promise<Whole | undefined> {
  const conversation = await database.readConversation(id);
  return conversation && { conversation, messages: await database.messagesOf(id) };
}

async function replace(whole: Whole): Promise<void> {
  const { id } = whole.conversation;
  const kept = new Set(whole.messages.map((one) => one.id));
  const gone = (await database.messagesOf(id)).filter((one) => !kept.has(one.id));
  await database.putAll([whole]);
  await database.deleteMessages(gone.map((one) => one.id));
  await show(id);
}

async function drop(id: string): Promise<void> {
  await database.deleteConversation(id);
  await forgetRecord(id);
  await show(id);
}

/** Show a change of another device in all tabs. */
async function show(id: string): Promise<void> {
  await rereadConversation(id);
  announceToTabs({ conversation: id });
}
