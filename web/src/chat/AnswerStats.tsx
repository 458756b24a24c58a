import { formatSeconds } from "../ui/format";
import type { Stats } from "./tree";

/** Statistics of an answer: speed, tokens, time to first token, cache and drafts. */
export function AnswerStats({ stats, isStreaming = false }: { stats: Stats; isStreaming?: boolean }) {
  const { tokens, tokensPerSecond, firstTokenMs, promptTokens, cachedTokens, drafted, accepted } = stats;
  return (
    <span class={isStreaming ? "stats streaming" : "stats"}>
      <span title="generation speed">
        <b>{tokensPerSecond.toFixed(1)}</b> tokens/s
      </span>
      <span title="generated tokens">{tokens} tokens</span>
      <span title="time to first token">first token {formatSeconds(firstTokenMs / 1000)}</span>
      <span title="prompt tokens, including those of pictures and sounds, and how many of them came from the cache">
        prompt {promptTokens}
        {cachedTokens > 0 && `, ${cachedTokens} cached`}
      </span>
      {drafted ? (
        <span title="draft tokens: accepted and proposed">
          {accepted} of {drafted} drafts accepted
        </span>
      ) : null}
    </span>
  );
}
