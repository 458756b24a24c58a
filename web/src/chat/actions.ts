// User actions in a conversation: send, edit, regenerate, continue, stop, run a tool call.
import { computed, signal } from "@preact/signals";
import { explain } from "../api/problems";
import { isRouter, refreshProps } from "../api/server";
import { labels } from "../text";
import { toolSchemas, serverTools } from "../tools/catalog";
import { FrameScheduler } from "../ui/frames";
import { type Answer, generate } from "./generate";
import { navigate } from "../shell/route";
import type { Settings } from "./settings";
import { updateConversation, conversations, createConversation, current, saveMessage, messages, newId, whenLoaded, shownSettings } from "./store";
import { type Attachment, type Message, newestLeaf, path, type ToolCall } from "./tree";
import { UnfinishedSaver } from "./unfinished";

interface StreamingMessage {
  message: Message;
  progress: number | undefined;
}

/** The messages that are streaming, by id; each entry is replaced once per animation frame. */
export const streaming = signal<ReadonlyMap<string, StreamingMessage>>(new Map());
/** Error of the current conversation that belongs to no message. */
export const failure = signal("");

/** Messages of the current branch, in order. */
export const shownPath = computed(() => path(messages.value, current.value?.leaf ?? null));

/** Work in progress in a conversation: a question until the end of its answer, or a tool call. */
interface Task {
  /** null until a new conversation has been created for the question. */
  conversation: string | null;
  abort: AbortController;
}

const tasks = signal<readonly Task[]>([]);

async function runTask(run: (stopped: AbortSignal, task: Task) => Promise<void>): Promise<void> {
  const task: Task = { conversation: current.value?.id ?? null, abort: new AbortController() };
  tasks.value = [...tasks.value, task];
  try {
    await run(task.abort.signal, task);
  } finally {
    tasks.value = tasks.value.filter((one) => one !== task);
  }
}

/** Return true if a conversation has work in progress. Others can be used meanwhile. */
export function isBusy(conversation: string | null): boolean {
  return tasks.value.some((one) => one.conversation === conversation);
}

/** True if the current conversation has work in progress. */
export const busy = computed(() => isBusy(current.value?.id ?? null));

/** Ids of the tool calls that are running. */
export const runningCalls = signal<ReadonlySet<string>>(new Set());

const MAX_ROUNDS = 10; // of automatic tool calls after one user message

/** Abort the work in progress in the current conversation. */
export function stop(): void {
  const shown = current.value?.id ?? null;
  for (const one of tasks.value) if (one.conversation === shown) one.abort.abort();
}

/** Snapshot of a conversation for one request; the user may open another conversation before the answer arrives. */
interface Thread {
  conversation: string;
  settings: Settings;
  messages: Message[];
}

/** Return the current conversation up to a message. */
function threadTo(leaf: string | null): Thread {
  return { conversation: current.value!.id, settings: shownSettings(), messages: path(messages.value, leaf) };
}

function newMessage(role: Message["role"], thread: Thread, content: string): Message {
  const parent = thread.messages.at(-1)?.id ?? null;
  return { id: newId(), conversation: thread.conversation, parent, role, content, created: Date.now() };
}

function withMessage(thread: Thread, message: Message): Thread {
  return { ...thread, messages: [...thread.messages, message] };
}

/** Append a user message to the current branch and request its answer. */
export async function send(content: string, attachments: Attachment[]): Promise<void> {
  if (busy.value) return;
  await runTask(async (stopped, task) => {
    await whenLoaded();
    let created: Promise<void> | undefined;
    if (!current.value) {
      created = createConversation(content || attachments[0]?.name || "", shownSettings());
      navigate("chat", current.value!.id);
    }
    task.conversation = current.value!.id;
    tasks.value = [...tasks.value];
    const thread = threadTo(shownPath.value.at(-1)?.id ?? null);
    await created;
    await ask(stopped, thread, content, attachments);
  });
}

/** Add another version of a user message and request its answer. */
export async function resend(message: Message, content: string): Promise<void> {
  if (!busy.value) await runTask((stopped) => ask(stopped, threadTo(message.parent), content, message.attachments ?? []));
}

async function ask(stopped: AbortSignal, thread: Thread, content: string, attachments: Attachment[]): Promise<void> {
  const message = { ...newMessage("user", thread, content), ...(attachments.length ? { attachments } : {}) };
  await saveMessage(message);
  await answer(stopped, withMessage(thread, message));
}

/** Add a tool result. Once every call of the message has a result, request the next answer. */
export async function sendResult(call: Message, toolCallId: string, content: string): Promise<void> {
  const shown = shownPath.value;
  const at = shown.findIndex((one) => one.id === call.id);
  const results = shown.slice(at + 1).filter((one) => one.role === "tool");
  const thread = threadTo((results.at(-1) ?? call).id);
  const message: Message = { ...newMessage("tool", thread, content), toolCallId };
  const answered = new Set([...results.map((one) => one.toolCallId), toolCallId]);
  await runTask(async (stopped) => {
    await saveMessage(message);
    if ((call.toolCalls ?? []).every((one) => answered.has(one.id))) await answer(stopped, withMessage(thread, message));
  });
}

/** Run a tool call of a message and send its result to the model. */
export async function runCall(message: Message, call: ToolCall): Promise<void> {
  const tool = serverTools.value.find((one) => one.name === call.name);
  if (!tool || runningCalls.value.has(call.id)) return;
  await runTask(async (stopped) => {
    runningCalls.value = new Set([...runningCalls.value, call.id]);
    let result: string;
    try {
      const parsed: unknown = JSON.parse(call.arguments || "{}");
      if (typeof parsed !== "object" || parsed === null) throw new Error("the arguments are not a JSON object");
      result = await tool.run(parsed as Record<string, unknown>, stopped);
    } catch (error) {
      result = `Error: ${error instanceof Error ? error.message : String(error)}`;
    } finally {
      runningCalls.value = new Set([...runningCalls.value].filter((id) => id !== call.id));
    }
    // If it was stopped, or another conversation is open, the user can run the call again.
    if (!stopped.aborted && shownPath.value.some((one) => one.id === message.id)) await sendResult(message, call.id, result);
  });
}

/** Run those tool calls of an answer that the user set to run automatically. */
async function runAutomatically(stopped: AbortSignal, message: Message): Promise<void> {
  const { serverTools: enabled, autoTools } = shownSettings();
  const calls = (message.toolCalls ?? []).filter(({ name }) => enabled.includes(name) && autoTools.includes(name));
  if (!calls.length || message.ending !== "tool_calls") return;
  const since = shownPath.value.slice(shownPath.value.findLastIndex((one) => one.role === "user") + 1);
  if (since.filter((one) => one.toolCalls?.length).length > MAX_ROUNDS) {
    failure.value = labels.value.chat.tooManyRounds(MAX_ROUNDS);
    return;
  }
  for (const call of calls) if (!stopped.aborted) await runCall(message, call);
}

/** Add another version of an answer. */
export async function regenerate(message: Message): Promise<void> {
  if (!busy.value) await runTask((stopped) => answer(stopped, threadTo(message.parent)));
}

/** Continue an answer that has ended. */
export async function continueAnswer(message: Message): Promise<void> {
  if (!busy.value) await runTask((stopped) => answer(stopped, threadTo(message.parent), message));
}

/** Show a version of a message. */
export async function showVersion(message: Message): Promise<void> {
  await updateConversation({ leaf: newestLeaf(messages.value, message.id) });
}

/** Request the answer to a thread, or the continuation of the answer `from`, which follows the thread. */
async function answer(stopped: AbortSignal, thread: Thread, from?: Message): Promise<void> {
  if (current.value?.id === thread.conversation) failure.value = "";
  const { error: _, ...start }: Message = from ?? newMessage("assistant", thread, "");
  let latest: Answer | null = null;
  const frames = new FrameScheduler(() => {
    if (latest) setStreaming({ message: withAnswer(start, latest), progress: latest.progress });
  });
  const saver = new UnfinishedSaver(() => (latest ? withAnswer(start, latest) : start));
  setStreaming({ message: start, progress: undefined });
  let ended: Message = start;
  try {
    if (!from) await saveMessage({ ...start, ending: "interrupted" });
    const found = await generate({
      messages: from && (from.content || from.reasoning) ? [...thread.messages, from] : thread.messages,
      settings: thread.settings,
      serverTools: await toolSchemas(thread.settings.serverTools),
      signal: stopped,
      onUpdate: (one) => {
        latest = one;
        frames.request();
        saver.changed();
      },
    });
    ended = withAnswer(start, found);
  } catch (error) {
    const written = latest ? withAnswer(start, latest) : start;
    const action = written.content || written.reasoning ? "continue" : "regenerate";
    ended = { ...written, ending: "error", error: explain(error, action) };
  } finally {
    frames.end();
    saver.end();
    if (isRouter.value) void refreshProps(); // the request may have loaded one model and unloaded another
    const leaf = conversations.value.find((one) => one.id === ended.conversation)?.leaf;
    await saveMessage(ended, { leaf: leaf === ended.id || leaf === start.parent });
    streaming.value = new Map([...streaming.value].filter(([id]) => id !== ended.id));
  }
  if (current.value?.id === ended.conversation) await runAutomatically(stopped, ended);
}

function setStreaming(one: StreamingMessage): void {
  streaming.value = new Map(streaming.value).set(one.message.id, one);
}

/** Return a message extended by an answer, or by the continuation of one. */
export function withAnswer(start: Message, answer: Answer): Message {
  const message: Message = { ...start, content: start.content + answer.content };
  const reasoning = (start.reasoning ?? "") + answer.reasoning;
  if (reasoning) message.reasoning = reasoning;
  if (answer.thoughtMs) message.thoughtMs = (start.thoughtMs ?? 0) + answer.thoughtMs;
  if (answer.toolCalls.length) message.toolCalls = answer.toolCalls.map((call) => ({ ...call }));
  if (answer.probs.length) message.probs = [...(start.probs ?? []), ...answer.probs];
  if (answer.model) message.model = answer.model;
  if (answer.stats) message.stats = answer.stats;
  if (answer.ending) message.ending = answer.ending;
  return message;
}
