// Work in progress in conversations: a question until the end of its answer, or a tool call.
import { computed, signal } from "@preact/signals";
import { current } from "./store";

export interface Task {
  /** null until a new conversation has been created for the question. */
  conversation: string | null;
  abort: AbortController;
}

const tasks = signal<readonly Task[]>([]);
const idleListeners = new Set<(conversation: string) => void>();
const busyListeners = new Set<() => void>();

/** Run work that belongs to a conversation, by default the current one. */
export async function runTask(
  run: (stopped: AbortSignal, task: Task) => Promise<void>,
  conversation: string | null = current.value?.id ?? null,
): Promise<void> {
  const task: Task = { conversation, abort: new AbortController() };
  for (const listen of busyListeners) listen();
  tasks.value = [...tasks.value, task];
  try {
    await run(task.abort.signal, task);
  } finally {
    tasks.value = tasks.value.filter((one) => one !== task);
  }
  if (task.conversation && !isBusy(task.conversation)) for (const listen of idleListeners) listen(task.conversation);
}

/** Call `listen` before work begins. */
export function onBusy(listen: () => void): void {
  busyListeners.add(listen);
}

/** Name the conversation of a task that created it. */
export function setConversation(task: Task, conversation: string): void {
  task.conversation = conversation;
  tasks.value = [...tasks.value];
}

/** Call `listen` with the id of each conversation whose work has ended without an error. */
export function onIdle(listen: (conversation: string) => void): void {
  idleListeners.add(listen);
}

/** Return true if a conversation has work in progress. Others can be used meanwhile. */
export function isBusy(conversation: string | null): boolean {
  return tasks.value.some((one) => one.conversation === conversation);
}

/** True if the current conversation has work in progress. */
export const busy = computed(() => isBusy(current.value?.id ?? null));

/** True if any conversation has work in progress. */
export const isAnyBusy = computed(() => tasks.value.length > 0);

/** Abort the work in progress in the current conversation. */
export function stop(): void {
  const shown = current.value?.id ?? null;
  for (const one of tasks.value) if (one.conversation === shown) one.abort.abort();
}
