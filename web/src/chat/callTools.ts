// Tool calls of answers: run them and send their results to the model.
import { signal } from "@preact/signals";
import { labels } from "../text";
import { loadMissingTools, serverTools } from "../tools/catalog";
import { answer, type AnswerOptions, failure } from "./answer";
import { preferences } from "./preferences";
import { current, newId, saveMessage, shownPath, shownSettings } from "./store";
import { runTask } from "./tasks";
import { newMessage, type Thread, threadTo, withMessage } from "./thread";
import type { Message, ToolCall } from "./tree";

const MAX_ROUNDS = 10; // of automatic tool calls after one user message

/** Ids of the tool calls that are running. */
export const runningCalls = signal<ReadonlySet<string>>(new Set());

/** Request the answer to a thread, and run those tool calls that the user set to run automatically. */
export async function answerWithTools(stopped: AbortSignal, thread: Thread, options: AnswerOptions = {}): Promise<void> {
  const ended = await answer(stopped, thread, options);
  if (current.value?.id === ended.conversation) await runAutomatically(stopped, ended);
}

/** Request the answers to a question: one, or as many as the settings ask for. */
export async function answerQuestion(stopped: AbortSignal, thread: Thread): Promise<void> {
  const { answers } = preferences.value;
  if (answers < 2) return answerWithTools(stopped, thread);
  const group = newId();
  await Promise.all(Array.from({ length: answers }, (_, index) => answer(stopped, thread, { index, group })));
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
    if ((call.toolCalls ?? []).every((one) => answered.has(one.id))) await answerWithTools(stopped, withMessage(thread, message));
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
  await loadMissingTools(calls.map(({ name }) => name));
  if (current.value?.leaf !== message.id) return; // the user has gone on elsewhere
  const since = shownPath.value.slice(shownPath.value.findLastIndex((one) => one.role === "user") + 1);
  if (since.filter((one) => one.toolCalls?.length).length > MAX_ROUNDS) {
    failure.value = labels.value.chat.tooManyRounds(MAX_ROUNDS);
    return;
  }
  for (const call of calls) if (!stopped.aborted) await runCall(message, call);
}
