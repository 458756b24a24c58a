// Generation of one answer: a chat request and the sum of its stream.
import { stream } from "../api/http";
import { isBaseModel } from "../api/server";
import { type KeptStream, keptStream } from "./keptStreams";
import { requestFields, type Settings } from "./settings";
import { toBase64, toDataUri } from "../media/dataUri";
import { type Attachment, type Ending, isMedia, isText, type MediaFile, type Message, type Stats, type TextFile, type TokenProbs, type ToolCall } from "./tree";

const MAX_BASE_MODEL_TOKENS = 1024; // as in `llamado run`

export interface Timings {
  cache_n: number;
  prompt_n: number;
  predicted_n: number;
  predicted_per_second: number;
  draft_n?: number;
  draft_n_accepted?: number;
}

interface ToolCallDelta {
  index: number;
  id?: string;
  function?: { name?: string; arguments?: string };
}

interface Chunk {
  model?: string;
  choices?: {
    finish_reason: string | null;
    delta: { content?: string | null; reasoning_content?: string | null; tool_calls?: ToolCallDelta[] };
    logprobs?: { content?: { token: string; logprob: number; top_logprobs?: { token: string; logprob: number }[] }[] };
  }[];
  timings?: Timings;
  prompt_progress?: { total: number; cache: number; processed: number; time_ms: number };
}

/** The answer so far. */
export interface Answer {
  content: string;
  reasoning: string;
  toolCalls: ToolCall[];
  probs: TokenProbs[];
  model: string;
  ending?: Ending;
  stats?: Stats;
  /** Milliseconds of reasoning. */
  thoughtMs?: number;
  /** Fraction of the prompt that is processed, before the first token. */
  progress?: number;
}

interface StreamOptions {
  signal: AbortSignal;
  /** Called after each event with the same, updated object. */
  onUpdate: (answer: Answer) => void;
}

export interface GenerateOptions extends StreamOptions {
  messages: Message[];
  settings: Settings;
  /** Schemas of the enabled tools of the server. */
  serverTools?: readonly unknown[];
  /** The stream that the server keeps while the page does not read it; without one it keeps none. */
  kept?: KeptStream;
}

/** Return a text file as a part of a message. */
export function fileText({ name, text }: TextFile): string {
  return `File: ${name}\n\`\`\`\n${text}\n\`\`\``;
}

/** Return a picture or sound as a part of a message. */
export async function mediaPart({ blob }: MediaFile): Promise<Record<string, unknown>> {
  if (blob.type.startsWith("image/")) return { type: "image_url", image_url: { url: await toDataUri(blob) } };
  const format = blob.type === "audio/mpeg" ? "mp3" : blob.type.slice("audio/".length);
  return { type: "input_audio", input_audio: { data: await toBase64(blob), format } };
}

/** Return a text with its attachments, as sent to the model: text, or parts if there are pictures or sounds. */
export async function withAttachments(content: string, attachments: readonly Attachment[] = []): Promise<unknown> {
  const files = attachments.filter(isText);
  if (files.length === attachments.length) return [...files.map(fileText), content].join("\n\n");
  const parts = attachments.map((one) => (isMedia(one) ? mediaPart(one) : { type: "text", text: `${fileText(one)}\n\n` }));
  return Promise.all(content ? [...parts, { type: "text", text: content }] : parts);
}

async function asMessage(message: Message): Promise<Record<string, unknown>> {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
  }
  const plain: Record<string, unknown> = {
    role: message.role,
    content: await withAttachments(message.content, message.attachments),
  };
  if (message.reasoning) plain["reasoning_content"] = message.reasoning;
  if (message.toolCalls?.length) {
    plain["tool_calls"] = message.toolCalls.map(({ id, name, arguments: args }) => ({
      id,
      type: "function",
      function: { name, arguments: args },
    }));
  }
  return plain;
}

/** Return the messages of a request, with the system prompt. */
export async function chatMessages({ system }: Settings, messages: readonly Message[]): Promise<Record<string, unknown>[]> {
  const first = system.trim() ? [{ role: "system", content: system }] : [];
  return [...first, ...(await Promise.all(messages.map(asMessage)))];
}

/**
 * Request the answer to `messages`, or the continuation of the last message if it is the model's own. Returns when the
 * answer has ended or `signal` aborts it. Throws ApiFailure, and Error for settings that are not JSON.
 */
export async function generate({ messages, settings, serverTools, kept, ...options }: GenerateOptions): Promise<Answer> {
  const body = {
    ...(isBaseModel.value ? { max_tokens: MAX_BASE_MODEL_TOKENS } : {}),
    ...requestFields(settings, serverTools),
    messages: await chatMessages(settings, messages),
    stream: true,
    return_progress: true,
    timings_per_token: true,
  };
  const { signal } = options;
  const events = kept ? keptStream(kept, signal, body) : stream("POST", "v1/chat/completions", { body, signal });
  return addEvents(newAnswer(), events, options);
}

/** Return the rest of an answer of which `written` is stored, from the stream that the server keeps. Throws as `generate`. */
export async function resume(written: Message, kept: KeptStream, options: StreamOptions): Promise<Answer> {
  const answer = newAnswer();
  answer.toolCalls = (written.toolCalls ?? []).map((call) => ({ ...call })); // their ends may be in the rest
  return addEvents(answer, keptStream(kept, options.signal), options, written.stats?.firstTokenMs);
}

function newAnswer(): Answer {
  return { content: "", reasoning: "", toolCalls: [], probs: [], model: "" };
}

/** Add the events of a stream to an answer until it ends or is aborted. `firstTokenMs`: if the first token was read before. */
async function addEvents(answer: Answer, events: AsyncGenerator<unknown>, { signal, onUpdate }: StreamOptions, firstTokenMs?: number): Promise<Answer> {
  const began = performance.now();
  let first = 0;
  let thinkingSince = 0; // milliseconds
  try {
    for await (const data of events) {
      const chunk = data as Chunk;
      const hasGrown = addChunk(answer, chunk);
      if (hasGrown && !first) first = performance.now();
      if (answer.reasoning && !answer.content) {
        thinkingSince ||= performance.now();
        answer.thoughtMs = performance.now() - thinkingSince;
      }
      if (chunk.timings) answer.stats = statsOf(chunk.timings, firstTokenMs ?? (first || performance.now()) - began);
      onUpdate(answer);
    }
    answer.ending ??= "interrupted"; // the stream ended without a finish_reason
  } catch (error) {
    if (answer.ending) return answer; // only the end of the stream was lost
    if (!signal.aborted) throw error;
    answer.ending = "aborted";
  }
  return answer;
}

/** Add an event of the stream to the answer. Return true if the answer grew. */
function addChunk(answer: Answer, chunk: Chunk): boolean {
  if (chunk.model) answer.model = chunk.model;
  if (chunk.prompt_progress) answer.progress = chunk.prompt_progress.processed / Math.max(1, chunk.prompt_progress.total);
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
  answer.content += content ?? "";
  answer.reasoning += thought ?? "";
  for (const call of calls ?? []) {
    const toolCall = (answer.toolCalls[call.index] ??= { id: "", name: "", arguments: "" });
    toolCall.id = call.id ?? toolCall.id;
    toolCall.name += call.function?.name ?? "";
    toolCall.arguments += call.function?.arguments ?? "";
  }
  for (const one of choice.logprobs?.content ?? []) {
    answer.probs.push({ token: one.token, logprob: one.logprob, top: one.top_logprobs ?? [] });
  }
  if (choice.finish_reason) answer.ending = choice.finish_reason as Ending;
  return Boolean(content || thought || calls?.length);
}

export function statsOf(timings: Timings, firstTokenMs: number): Stats {
  return {
    promptTokens: timings.prompt_n + timings.cache_n,
    cachedTokens: timings.cache_n,
    tokens: timings.predicted_n,
    tokensPerSecond: timings.predicted_per_second,
    firstTokenMs,
    ...(timings.draft_n === undefined ? {} : { drafted: timings.draft_n, accepted: timings.draft_n_accepted ?? 0 }),
  };
}
