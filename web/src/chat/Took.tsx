import type { Stats } from "./tree";

/** What an answer took. */
export function Took({ stats }: { stats: Stats }) {
  const first = stats.firstTokenMs >= 1000 ? `${(stats.firstTokenMs / 1000).toFixed(1)} s` : `${Math.round(stats.firstTokenMs)} ms`;
  return (
    <span class="took">
      {stats.tokens} tokens, {stats.tokensPerSecond.toFixed(1)}/s · first after {first} · prompt {stats.promptTokens}
      {stats.cachedTokens > 0 && `, ${stats.cachedTokens} from the cache`}
      {stats.drafted ? ` · ${stats.accepted} of ${stats.drafted} drafts taken` : ""}
    </span>
  );
}
