// Raw text requests: /completion and /infill.
import { stream } from "../api/http";
import { type Timings, statsOf } from "../chat/generate";
import { requestFields, type Settings } from "../chat/settings";
import type { Stats, TokenProbs } from "../chat/tree";
import { labels } from "../text";

interface Chunk {
  content?: string;
  completion_probabilities?: { token: string; logprob: number; top_logprobs?: { token: string; logprob: number }[] }[];
  stop?: boolean;
  stop_type?: "none" | "eos" | "limit" | "word";
  truncated?: boolean;
  timings?: Timings;
}

export interface Continuation {
  text: string;
  probs: TokenProbs[];
  /** Reason why it ended, for the user; "" while it streams. */
  ending: string;
  stats?: Stats;
}

/** Return settings as fields of the native endpoints. Throws an Error that names the field whose JSON is invalid. */
export function nativeFields(settings: Settings): Record<string, unknown> {
  const { response_format: format, top_logprobs, logprobs: _, ...others } = requestFields({ ...settings, tools: "" });
  const found = others;
  if (format) found["json_schema"] = (format as { json_schema: { schema: unknown } }).json_schema.schema;
  if (top_logprobs) found["n_probs"] = top_logprobs;
  return found;
}

/** Request a continuation; `signal` aborts it. Throws ApiFailure. */
export async function requestContinuation(
  path: "completion" | "infill",
  body: Record<string, unknown>,
  signal: AbortSignal,
  onUpdate: (found: Continuation) => void,
): Promise<Continuation> {
  const found: Continuation = { text: "", probs: [], ending: "" };
  const began = performance.now();
  let first = 0;
  let isComplete = false;
  try {
    for await (const data of stream("POST", path, { body: { ...body, stream: true }, signal })) {
      const chunk = data as Chunk;
      found.text += chunk.content ?? "";
      if (chunk.content) first ||= performance.now();
      for (const one of chunk.completion_probabilities ?? []) {
        found.probs.push({ token: one.token, logprob: one.logprob, top: one.top_logprobs ?? [] });
      }
      isComplete ||= Boolean(chunk.stop);
      if (chunk.stop) found.ending = labels.value.complete.endings[chunk.stop_type ?? "none"];
      if (chunk.timings) found.stats = statsOf(chunk.timings, (first || performance.now()) - began);
      onUpdate(found);
    }
    if (!isComplete) found.ending = labels.value.complete.interrupted;
  } catch (error) {
    if (!signal.aborted) throw error;
    found.ending = labels.value.common.stopped;
  }
  return found;
}
