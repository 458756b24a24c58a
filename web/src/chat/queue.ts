// Messages that wait for the end of an answer. Their texts survive a reload, attachments do not.
import { persistentSignal } from "../ui/persistent";
import { newId } from "./store";
import type { Attachment } from "./tree";

export interface QueuedMessage {
  id: string;
  conversation: string;
  text: string;
}

/** All waiting messages, in the order in which they are sent. */
export const queue = persistentSignal<readonly QueuedMessage[]>("queue", []);
const attachmentsOf = new Map<string, Attachment[]>();

export function enqueue(conversation: string, text: string, attachments: Attachment[]): void {
  const id = newId();
  attachmentsOf.set(id, attachments);
  queue.value = [...queue.value, { id, conversation, text }];
}

export function queuedAttachments(id: string): Attachment[] {
  return attachmentsOf.get(id) ?? [];
}

/** Return the message of a conversation that is sent next. */
export function nextQueued(conversation: string): QueuedMessage | undefined {
  return queue.value.find((one) => one.conversation === conversation);
}

/** Remove a message from the queue and return it; undefined if it was removed meanwhile. */
export function takeQueued(id: string): { text: string; attachments: Attachment[] } | undefined {
  const found = queue.value.find((one) => one.id === id);
  if (!found) return undefined;
  const attachments = queuedAttachments(id);
  queue.value = queue.value.filter((one) => one.id !== id);
  attachmentsOf.delete(id);
  return { text: found.text, attachments };
}

/** Remove the messages of deleted conversations. */
export function pruneQueue(conversations: ReadonlySet<string>): void {
  const left = queue.value.filter((one) => conversations.has(one.conversation));
  if (left.length < queue.value.length) queue.value = left;
}
