// Conversations and messages that the browser could not store. They stay in memory, and are stored once there is space.
import { signal } from "@preact/signals";
import { labels } from "../text";
import * as database from "./database";
import { announce } from "./tabs";
import type { Conversation, Message } from "./tree";

type Stored = Conversation | Message;

const unsaved = signal<ReadonlyMap<string, { value: Stored; reason: string }>>(new Map());

/** Ids of what is being stored. */
const writing = new Set<string>();

/** Return true if the browser's storage does not hold the latest state of a conversation or message. */
export function isAheadOfStorage(id: string): boolean {
  return writing.has(id) || unsaved.value.has(id);
}

export function conversationOf(value: Stored): string {
  return "conversation" in value ? value.conversation : value.id;
}

/** Store a conversation or message. A failure is shown to the user, who can go on with what is in memory. */
export async function put(value: Stored): Promise<void> {
  writing.add(value.id);
  try {
    await database.put(value);
    forgetUnsaved((one) => one.id === value.id);
    announce({ conversation: conversationOf(value) });
  } catch (error) {
    unsaved.value = new Map(unsaved.value).set(value.id, { value, reason: explainStorage(error) });
  } finally {
    writing.delete(value.id);
  }
}

/** Return why something of a conversation is not stored; "" if all is. */
export function reasonUnsaved(conversation: string | undefined): string {
  return [...unsaved.value.values()].find(({ value }) => conversationOf(value) === conversation)?.reason ?? "";
}

export function forgetUnsaved(isGone: (value: Stored) => boolean): void {
  const left = [...unsaved.value].filter(([, { value }]) => !isGone(value));
  if (left.length < unsaved.value.size) unsaved.value = new Map(left);
}

/** Try again to store what could not be stored. Called after space was freed. */
export async function retryUnsaved(): Promise<void> {
  await Promise.all([...unsaved.value.values()].map(({ value }) => put(value)));
}

/** Return why the browser did not store something, and what to do. */
export function explainStorage(error: unknown): string {
  if (error instanceof DOMException && error.name === "QuotaExceededError") {
    return labels.value.chat.storageFull;
  }
  return labels.value.chat.storageFailed(error instanceof Error ? error.message : String(error));
}
