// One answer of the model: a chat request, and what its stream adds up to.
import { stream } from "../api/http";
import { onlyGoesOn } from "../api/server";
import { asRequest, type Settings } from "./settings";
import type { Attachment, Ending, Message, Stats, TokenProbs, ToolCall } from "./tree";

const MOST_WITHOUT_END = 1024; // tokens, as `llamado run` has it

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

/** An answer as far as it is there. */
export interface Answer {
  content: string;
  reasoning: string;
  toolCalls: ToolCall[];
  probs: TokenProbs[];
  model: string;
  ending?: Ending;
  stats?: Stats;
  /** How long it thought. */
  thoughtMs?: number;
  /** How much of the prompt is read, from 0 to 1, before the first token. */
  progress?: number;
}

export interface Asked {
  messages: Message[];
  settings: Settings;
  /** Schemas of the server's own tools that are offered. */
  serverTools?: readonly unknown[];
  signal: AbortSignal;
  /** Called with the answer whenever it has grown; the object is the same each time. */
  onGrown: (answer: Answer) => void;
}

/** A text with its attachments, as the model reads it. */
export function withAttachments(content: string, attachments: readonly Attachment[] = []): string {
  const files = attachments.map(({ name, text }) => `File: ${name}\n\`\`\`\n${text}\n\`\`\``);
  return [...files, content].join("\n\n");
}

function asMessage(message: Message): Record<string, unknown> {
  if (message.role === "tool") {
    return { role: "tool", tool_call_id: message.toolCallId, content: message.content };
  }
  const plain: Record<string, unknown> = {
    role: message.role,
    content: withAttachments(message.content, message.attachments),
  };
  if (message.reasoning) plain["reasoning_content"] = message.reasoning;
  if (message.toolCalls?.length) {
    plain["tool_calls"] = message.toolCalls.map(({ id, name, arguments: given }) => ({
      id,
      type: "function",
      function: { name, arguments: given },
    }));
  }
  return plain;
}

/**
 * Asks for the answer to `messages`; where the last of them is the model's own, for what follows in it. Returns it when
 * it has ended, also by `signal`. Throws ApiFailure, and Error for settings that are no JSON.
 */
export async function generate({ messages, settings, serverTools, signal, onGrown }: Asked): Promise<Answer> {
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = {
    ...(onlyGoesOn.value ? { max_tokens: MOST_WITHOUT_END } : {}),
    ...asRequest(settings, serverTools),
    messages: [...system, ...messages.map(asMessage)],
    stream: true,
    return_progress: true,
    timings_per_token: true,
  };
  const answer: Answer = { content: "", reasoning: "", toolCalls: [], probs: [], model: "" };
  const began = performance.now();
  let first = 0;
  let thinks = 0; // since when
  try {
    for await (const data of stream("POST", "v1/chat/completions", { body, signal })) {
      const chunk = data as Chunk;
      const grown = add(answer, chunk);
      if (grown && !first) first = performance.now();
      if (answer.reasoning && !answer.content) {
        thinks ||= performance.now();
        answer.thoughtMs = performance.now() - thinks;
      }
      if (chunk.timings) answer.stats = statsOf(chunk.timings, (first || performance.now()) - began);
      onGrown(answer);
    }
    answer.ending ??= "interrupted"; // the stream ended without a finish_reason
  } catch (error) {
    if (!signal.aborted) throw error;
    answer.ending = "aborted";
  }
  return answer;
}

/** Puts a piece of the stream to the answer; whether there is more of it than before. */
function add(answer: Answer, chunk: Chunk): boolean {
  if (chunk.model) answer.model = chunk.model;
  if (chunk.prompt_progress) answer.progress = chunk.prompt_progress.processed / Math.max(1, chunk.prompt_progress.total);
  const choice = chunk.choices?.[0];
  if (!choice) return false;
  const { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
  answer.content += content ?? "";
  answer.reasoning += thought ?? "";
  for (const call of calls ?? []) {
    const known = (answer.toolCalls[call.index] ??= { id: "", name: "", arguments: "" });
    known.id = call.id ?? known.id;
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
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
