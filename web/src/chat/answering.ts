// What the reader does in a conversation: send, edit, regenerate, continue, stop, answer a tool's call.
import { computed, signal } from "@preact/signals";
import { ApiFailure } from "../api/http";
import { offered, serverTools } from "../tools/offered";
import { Pictures } from "../ui/pictures";
import { type Answer, generate } from "./generate";
import { change, create, current, keep, messages, newId, shownSettings } from "./store";
import { type Attachment, type Message, newestLeaf, path, type ToolCall } from "./tree";

/** The message that is being made, and how it stands: a new object for each picture of the screen. */
export const growing = signal<{ message: Message; progress: number | undefined } | null>(null);
export const failure = signal("");

/** The messages that are shown, in their order. */
export const shownPath = computed(() => path(messages.value, current.value?.leaf ?? null));

/** What is under way: from a question's Enter, before it is kept, to the last word of its answer. */
const running = signal<ReadonlySet<AbortController>>(new Set());

async function underWay(work: (stopped: AbortSignal) => Promise<void>): Promise<void> {
  const mine = new AbortController();
  running.value = new Set([...running.value, mine]);
  try {
    await work(mine.signal);
  } finally {
    running.value = new Set([...running.value].filter((one) => one !== mine));
  }
}

/** Ids of the calls that are being made. */
export const calling = signal<ReadonlySet<string>>(new Set());
/** Whether the reader must wait, or stop what runs. */
export const busy = computed(() => running.value.size > 0 || calling.value.size > 0);

const MOST_ROUNDS = 10; // of tools that run by themselves, for one message of the reader's
let callsRunning = new AbortController();

export function stop(): void {
  for (const one of running.value) one.abort();
  callsRunning.abort();
  callsRunning = new AbortController();
}

function blank(role: Message["role"], parent: string | null, content: string): Message {
  return { id: newId(), conversation: current.value!.id, parent, role, content, created: Date.now() };
}

/** A message of the reader's behind `parent`, and its answer. */
export async function send(content: string, attachments: Attachment[], parent: string | null): Promise<void> {
  if (busy.value) return;
  await underWay(async (stopped) => {
    if (!current.value) await create(content || attachments[0]?.name || "", shownSettings());
    const message = { ...blank("user", parent, content), ...(attachments.length ? { attachments } : {}) };
    await keep(message);
    await answer(stopped, message.id);
  });
}

/** What a tool said; when all calls of the message have their results, the model goes on. */
export async function sendResult(call: Message, toolCallId: string, content: string): Promise<void> {
  const shown = shownPath.value;
  const at = shown.findIndex((one) => one.id === call.id);
  const results = shown.slice(at + 1).filter((one) => one.role === "tool");
  const last = results.at(-1) ?? call;
  const message: Message = { ...blank("tool", last.id, content), toolCallId };
  const answered = new Set([...results.map((one) => one.toolCallId), toolCallId]);
  await underWay(async (stopped) => {
    await keep(message);
    if ((call.toolCalls ?? []).every((one) => answered.has(one.id))) await answer(stopped, message.id);
  });
}

/** Makes a call of a message's and gives its result to the model. */
export async function runCall(message: Message, call: ToolCall): Promise<void> {
  const tool = serverTools.value.find((one) => one.name === call.name);
  if (!tool || calling.value.has(call.id)) return;
  const { signal } = callsRunning;
  calling.value = new Set([...calling.value, call.id]);
  let result: string;
  try {
    const given: unknown = JSON.parse(call.arguments || "{}");
    if (typeof given !== "object" || given === null) throw new Error("the arguments are no JSON object");
    result = await tool.run(given as Record<string, unknown>, signal);
  } catch (error) {
    result = `Error: ${error instanceof Error ? error.message : String(error)}`;
  } finally {
    calling.value = new Set([...calling.value].filter((id) => id !== call.id));
  }
  // Stopped, or another conversation is shown meanwhile: the call can be made again there.
  if (!signal.aborted && shownPath.value.some((one) => one.id === message.id)) await sendResult(message, call.id, result);
}

/** Makes the calls of an answer that run by themselves. */
async function runByThemselves(message: Message): Promise<void> {
  const { serverTools: told, autoTools } = shownSettings();
  const calls = (message.toolCalls ?? []).filter(({ name }) => told.includes(name) && autoTools.includes(name));
  if (!calls.length || message.ending !== "tool_calls") return;
  const since = shownPath.value.slice(shownPath.value.findLastIndex((one) => one.role === "user") + 1);
  if (since.filter((one) => one.toolCalls?.length).length > MOST_ROUNDS) {
    failure.value = `${MOST_ROUNDS} rounds of tools ran by themselves: the next is yours to run.`;
    return;
  }
  const { signal } = callsRunning;
  for (const call of calls) if (!signal.aborted) await runCall(message, call);
}

/** Another answer beside this one. */
export async function regenerate(message: Message): Promise<void> {
  if (!busy.value) await underWay((stopped) => answer(stopped, message.parent));
}

/** More of an answer that has ended. */
export async function goOn(message: Message): Promise<void> {
  if (!busy.value) await underWay((stopped) => answer(stopped, message.parent, message));
}

/** The version of a message that is shown. */
export async function show(message: Message): Promise<void> {
  await change({ leaf: newestLeaf(messages.value, message.id) });
}

/** Asks for the answer to the branch that ends with `parent`; `from`: for what follows in that answer. */
async function answer(stopped: AbortSignal, parent: string | null, from?: Message): Promise<void> {
  failure.value = "";
  const start: Message = from ?? blank("assistant", parent, "");
  const asked = from ? [...path(messages.value, parent), from] : path(messages.value, parent);
  let latest: Answer | null = null;
  const picture = new Pictures(() => {
    if (latest) growing.value = { message: grown(start, latest), progress: latest.progress };
  });
  growing.value = { message: start, progress: undefined };
  let ended: Message = start;
  try {
    if (!from) await keep(start);
    const found = await generate({
      messages: asked,
      settings: shownSettings(),
      serverTools: await offered(shownSettings().serverTools),
      signal: stopped,
      onGrown: (one) => {
        latest = one;
        picture.want();
      },
    });
    ended = grown(start, found);
  } catch (error) {
    const words = error instanceof Error ? error.message : String(error);
    if (error instanceof ApiFailure && error.status === 401) failure.value = "";
    else failure.value = words;
    ended = { ...(latest ? grown(start, latest) : start), ending: "error", error: words };
  } finally {
    picture.end();
    await keep(ended, { leaf: current.value?.leaf === ended.id || current.value?.leaf === start.parent });
    growing.value = null;
  }
  if (current.value?.id === ended.conversation) await runByThemselves(ended);
}

/** A message with an answer, or with what goes on in it. */
export function grown(start: Message, answer: Answer): Message {
  const message: Message = { ...start, content: start.content + answer.content };
  const reasoning = (start.reasoning ?? "") + answer.reasoning;
  if (reasoning) message.reasoning = reasoning;
  if (answer.toolCalls.length) message.toolCalls = answer.toolCalls.map((call) => ({ ...call }));
  if (answer.probs.length) message.probs = [...(start.probs ?? []), ...answer.probs];
  if (answer.model) message.model = answer.model;
  if (answer.stats) message.stats = answer.stats;
  if (answer.ending) message.ending = answer.ending;
  return message;
}
