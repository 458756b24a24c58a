// What the reader does in a conversation: send, edit, regenerate, continue, stop, answer a tool's call.
import { computed, signal } from "@preact/signals";
import { explain } from "../api/problems";
import { isRouter, refresh } from "../api/server";
import { offered, serverTools } from "../tools/offered";
import { Pictures } from "../ui/pictures";
import { type Answer, generate } from "./generate";
import { go } from "../shell/route";
import type { Settings } from "./settings";
import { change, conversations, create, current, keep, messages, newId, opened, shownSettings } from "./store";
import { type Attachment, type Message, newestLeaf, path, type ToolCall } from "./tree";
import { UnfinishedSaver } from "./unfinished";

interface Growing {
  message: Message;
  progress: number | undefined;
}

/** The messages that are being made, by their ids, and how they stand: new objects for each picture of the screen. */
export const growing = signal<ReadonlyMap<string, Growing>>(new Map());
/** Why the conversation that is shown does not go on, if no message says so. */
export const failure = signal("");

/** The messages that are shown, in their order. */
export const shownPath = computed(() => path(messages.value, current.value?.leaf ?? null));

/** What is under way: from a question's Enter, before it is kept, to the last word of its answer; a tool's call. */
interface Work {
  /** null: of the one that begins with the question. */
  conversation: string | null;
  abort: AbortController;
}

const works = signal<readonly Work[]>([]);

async function underWay(run: (stopped: AbortSignal, mine: Work) => Promise<void>): Promise<void> {
  const mine: Work = { conversation: current.value?.id ?? null, abort: new AbortController() };
  works.value = [...works.value, mine];
  try {
    await run(mine.abort.signal, mine);
  } finally {
    works.value = works.value.filter((one) => one !== mine);
  }
}

/** Whether something is under way in a conversation; in others meanwhile the reader can do what they like. */
export function isBusy(conversation: string | null): boolean {
  return works.value.some((one) => one.conversation === conversation);
}

/** Whether the reader must wait, or stop what runs, in the conversation that is shown. */
export const busy = computed(() => isBusy(current.value?.id ?? null));

/** Ids of the calls that are being made. */
export const calling = signal<ReadonlySet<string>>(new Set());

const MOST_ROUNDS = 10; // of tools that run by themselves, for one message of the reader's

/** Ends what is under way in the conversation that is shown. */
export function stop(): void {
  const shown = current.value?.id ?? null;
  for (const one of works.value) if (one.conversation === shown) one.abort.abort();
}

/** What a question is asked of. The reader may go to another conversation before its answer has come. */
interface Thread {
  conversation: string;
  settings: Settings;
  messages: Message[];
}

/** The conversation that is shown, down to a message. */
function thread(leaf: string | null): Thread {
  return { conversation: current.value!.id, settings: shownSettings(), messages: path(messages.value, leaf) };
}

function blank(role: Message["role"], behind: Thread, content: string): Message {
  const parent = behind.messages.at(-1)?.id ?? null;
  return { id: newId(), conversation: behind.conversation, parent, role, content, created: Date.now() };
}

function extended(behind: Thread, message: Message): Thread {
  return { ...behind, messages: [...behind.messages, message] };
}

/** A message of the reader's and its answer, at the end of what is shown. */
export async function send(content: string, attachments: Attachment[]): Promise<void> {
  if (busy.value) return;
  await underWay(async (stopped, mine) => {
    await opened();
    let created: Promise<void> | undefined;
    if (!current.value) {
      created = create(content || attachments[0]?.name || "", shownSettings());
      go("chat", current.value!.id);
    }
    mine.conversation = current.value!.id;
    works.value = [...works.value];
    const behind = thread(shownPath.value.at(-1)?.id ?? null);
    await created;
    await ask(stopped, behind, content, attachments);
  });
}

/** Another wording of a message of the reader's, beside it, and its answer. */
export async function sendAgain(message: Message, content: string): Promise<void> {
  if (!busy.value) await underWay((stopped) => ask(stopped, thread(message.parent), content, message.attachments ?? []));
}

async function ask(stopped: AbortSignal, behind: Thread, content: string, attachments: Attachment[]): Promise<void> {
  const message = { ...blank("user", behind, content), ...(attachments.length ? { attachments } : {}) };
  await keep(message);
  await answer(stopped, extended(behind, message));
}

/** What a tool said; when all calls of the message have their results, the model goes on. */
export async function sendResult(call: Message, toolCallId: string, content: string): Promise<void> {
  const shown = shownPath.value;
  const at = shown.findIndex((one) => one.id === call.id);
  const results = shown.slice(at + 1).filter((one) => one.role === "tool");
  const behind = thread((results.at(-1) ?? call).id);
  const message: Message = { ...blank("tool", behind, content), toolCallId };
  const answered = new Set([...results.map((one) => one.toolCallId), toolCallId]);
  await underWay(async (stopped) => {
    await keep(message);
    if ((call.toolCalls ?? []).every((one) => answered.has(one.id))) await answer(stopped, extended(behind, message));
  });
}

/** Makes a call of a message's and gives its result to the model. */
export async function runCall(message: Message, call: ToolCall): Promise<void> {
  const tool = serverTools.value.find((one) => one.name === call.name);
  if (!tool || calling.value.has(call.id)) return;
  await underWay(async (stopped) => {
    calling.value = new Set([...calling.value, call.id]);
    let result: string;
    try {
      const given: unknown = JSON.parse(call.arguments || "{}");
      if (typeof given !== "object" || given === null) throw new Error("the arguments are no JSON object");
      result = await tool.run(given as Record<string, unknown>, stopped);
    } catch (error) {
      result = `Error: ${error instanceof Error ? error.message : String(error)}`;
    } finally {
      calling.value = new Set([...calling.value].filter((id) => id !== call.id));
    }
    // Stopped, or another conversation is shown meanwhile: the call can be made again there.
    if (!stopped.aborted && shownPath.value.some((one) => one.id === message.id)) await sendResult(message, call.id, result);
  });
}

/** Makes the calls of an answer that run by themselves. */
async function runByThemselves(stopped: AbortSignal, message: Message): Promise<void> {
  const { serverTools: told, autoTools } = shownSettings();
  const calls = (message.toolCalls ?? []).filter(({ name }) => told.includes(name) && autoTools.includes(name));
  if (!calls.length || message.ending !== "tool_calls") return;
  const since = shownPath.value.slice(shownPath.value.findLastIndex((one) => one.role === "user") + 1);
  if (since.filter((one) => one.toolCalls?.length).length > MOST_ROUNDS) {
    failure.value = `${MOST_ROUNDS} rounds of tools ran without asking. To go on, run the next one yourself.`;
    return;
  }
  for (const call of calls) if (!stopped.aborted) await runCall(message, call);
}

/** Another answer beside this one. */
export async function regenerate(message: Message): Promise<void> {
  if (!busy.value) await underWay((stopped) => answer(stopped, thread(message.parent)));
}

/** More of an answer that has ended. */
export async function goOn(message: Message): Promise<void> {
  if (!busy.value) await underWay((stopped) => answer(stopped, thread(message.parent), message));
}

/** The version of a message that is shown. */
export async function show(message: Message): Promise<void> {
  await change({ leaf: newestLeaf(messages.value, message.id) });
}

/** Asks for the answer to a thread; `from`: for what follows in that answer, which stands behind the thread. */
async function answer(stopped: AbortSignal, behind: Thread, from?: Message): Promise<void> {
  if (current.value?.id === behind.conversation) failure.value = "";
  const { error: _, ...start }: Message = from ?? blank("assistant", behind, "");
  let latest: Answer | null = null;
  const picture = new Pictures(() => {
    if (latest) grows({ message: grown(start, latest), progress: latest.progress });
  });
  const saver = new UnfinishedSaver(() => (latest ? grown(start, latest) : start));
  grows({ message: start, progress: undefined });
  let ended: Message = start;
  try {
    if (!from) await keep({ ...start, ending: "interrupted" });
    const found = await generate({
      messages: from && (from.content || from.reasoning) ? [...behind.messages, from] : behind.messages,
      settings: behind.settings,
      serverTools: await offered(behind.settings.serverTools),
      signal: stopped,
      onGrown: (one) => {
        latest = one;
        picture.want();
        saver.changed();
      },
    });
    ended = grown(start, found);
  } catch (error) {
    const written = latest ? grown(start, latest) : start;
    const again = written.content || written.reasoning ? "choose Continue" : "choose Regenerate";
    ended = { ...written, ending: "error", error: explain(error, again) };
  } finally {
    picture.end();
    saver.end();
    if (isRouter.value) void refresh(); // it may have loaded the model, and unloaded another
    const leaf = conversations.value.find((one) => one.id === ended.conversation)?.leaf;
    await keep(ended, { leaf: leaf === ended.id || leaf === start.parent });
    growing.value = new Map([...growing.value].filter(([id]) => id !== ended.id));
  }
  if (current.value?.id === ended.conversation) await runByThemselves(stopped, ended);
}

function grows(one: Growing): void {
  growing.value = new Map(growing.value).set(one.message.id, one);
}

/** A message with an answer, or with what goes on in it. */
export function grown(start: Message, answer: Answer): Message {
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
