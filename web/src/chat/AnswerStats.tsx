import { labels } from "../text";
import { formatDecimal, formatSeconds } from "../ui/format";
import type { Stats } from "./tree";

/** Statistics of an answer: speed, tokens, time to first token, cache and drafts. */
export function AnswerStats({ stats, isStreaming = false }: { stats: Stats; isStreaming?: boolean }) {
  const t = labels.value.chat;
  const { tokens, tokensPerSecond, firstTokenMs, promptTokens, cachedTokens, drafted, accepted } = stats;
  return (
    <span class={isStreaming ? "stats streaming" : "stats"}>
      <span title={t.generationSpeed}>
        <b>{formatDecimal(tokensPerSecond, 1)}</b> {labels.value.common.tokensPerSecond}
      </span>
      <span title={t.generatedTokens}>{labels.value.common.tokens(tokens)}</span>
      <span title={t.firstTokenTitle}>{t.firstToken(formatSeconds(firstTokenMs / 1000))}</span>
      <span title={t.promptTitle}>{t.prompt(promptTokens, cachedTokens)}</span>
      {drafted ? <span title={t.draftsTitle}>{t.drafts(accepted ?? 0, drafted)}</span> : null}
    </span>
  );
}
