import type { Stats } from "./tree";

function duration(ms: number): string {
  return ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${Math.round(ms)} ms`;
}

/** What an answer took, or takes while it is made. */
export function Took({ stats, grows = false }: { stats: Stats; grows?: boolean }) {
  const { tokens, tokensPerSecond, firstTokenMs, promptTokens, cachedTokens, drafted, accepted } = stats;
  return (
    <span class={grows ? "taking" : "took"}>
      <span title="speed of the answer">
        <b>{tokensPerSecond.toFixed(1)}</b> tokens/s
      </span>
      <span title="length of the answer">{tokens} tokens</span>
      <span title="time to the first token">first after {duration(firstTokenMs)}</span>
      <span title="tokens of the prompt, and those of them that were in the cache">
        prompt {promptTokens}
        {cachedTokens > 0 && `, ${cachedTokens} cached`}
      </span>
      {drafted ? (
        <span title="tokens that were guessed ahead, and those of them that were right">
          {accepted} of {drafted} drafts taken
        </span>
      ) : null}
    </span>
  );
}
