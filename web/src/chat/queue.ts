// Messages that wait for the end of an answer. They survive a reload.
import { signal } from "@preact/signals";
import { persistentSignal } from "../ui/persistent";
import { deleteFiles, readFiles, storeFiles } from "./queuedFiles";
import { newId } from "./store";
import type { Attachment } from "./tree";

export interface QueuedMessage {
  id: string;
  conversation: string;
  text: string;
  /** True if files are attached. */
  hasFiles?: boolean;
}

/** All waiting messages, in the order in which they are sent. */
export const queue = persistentSignal<readonly QueuedMessage[]>("queue", []);
const attachments = signal<ReadonlyMap<string, Attachment[]>>(new Map());

/** Files of messages that waited when the page was loaded. */
const reading = Promise.all(queue.value.filter((one) => one.hasFiles).map(({ id }) => readFiles(id).then((files) => setFiles(id, files), () => undefined)));

function setFiles(id: string, files: Attachment[]): void {
  attachments.value = new Map(attachments.value).set(id, files);
}

export function enqueue(conversation: string, text: string, files: Attachment[]): void {
  const id = newId();
  if (files.length) {
    setFiles(id, files);
    void storeFiles(id, files);
  }
  queue.value = [...queue.value, { id, conversation, text, hasFiles: files.length > 0 }];
}

export function queuedAttachments(id: string): Attachment[] {
  return attachments.value.get(id) ?? [];
}

/** Return the message of a conversation that is sent next. */
export function nextQueued(conversation: string): QueuedMessage | undefined {
  return queue.value.find((one) => one.conversation === conversation);
}

/** Remove a message from the queue and return it; undefined if it was removed meanwhile. */
export async function takeQueued(id: string): Promise<{ text: string; attachments: Attachment[] } | undefined> {
  await reading;
  const found = queue.value.find((one) => one.id === id);
  if (!found) return undefined;
  const files = queuedAttachments(id);
  removeQueued((one) => one.id === id);
  return { text: found.text, attachments: files };
}

function removeQueued(isGone: (message: QueuedMessage) => boolean): void {
  const gone = queue.value.filter(isGone);
  if (!gone.length) return;
  queue.value = queue.value.filter((one) => !isGone(one));
  for (const { id, hasFiles } of gone) if (hasFiles) void deleteFiles(id);
  const ids = new Set(gone.map(({ id }) => id));
  attachments.value = new Map([...attachments.value].filter(([id]) => !ids.has(id)));
}

/** Remove the messages of deleted conversations. */
export function pruneQueue(conversations: ReadonlySet<string>): void {
  removeQueued((one) => !conversations.has(one.conversation));
}
