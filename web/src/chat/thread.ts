// Threads: snapshots of a conversation for one request. The user may open another conversation before the answer arrives.
import type { Settings } from "./settings";
import { conversations, current, messages, messagesOf, newId, settingsOf, shownSettings } from "./store";
import { type Message, path } from "./tree";

export interface Thread {
  conversation: string;
  settings: Settings;
  messages: Message[];
}

/** Return the current conversation up to a message. */
export function threadTo(leaf: string | null): Thread {
  return { conversation: current.value!.id, settings: shownSettings(), messages: path(messages.value, leaf) };
}

/** Return the shown branch of any conversation; null if it was deleted. */
export async function threadOf(id: string): Promise<Thread | null> {
  const conversation = conversations.value.find((one) => one.id === id);
  if (!conversation) return null;
  if (current.value?.id === id) return threadTo(conversation.leaf);
  const all = new Map((await messagesOf(id)).map((one) => [one.id, one]));
  return { conversation: id, settings: settingsOf(conversation), messages: path(all, conversation.leaf) };
}

/** Return a message that follows a thread. */
export function newMessage(role: Message["role"], thread: Thread, content: string): Message {
  const parent = thread.messages.at(-1)?.id ?? null;
  return { id: newId(), conversation: thread.conversation, parent, role, content, created: Date.now() };
}

export function withMessage(thread: Thread, message: Message): Thread {
  return { ...thread, messages: [...thread.messages, message] };
}
