import { props } from "../api/server";
import { labels } from "../text";
import { useDraftTokens } from "./draftTokens";
import { shownPath } from "./store";

const NEARLY_FULL = 85; // percent

/** Fill level of the context: the tokens of the chat, from the statistics of its last answer, and those of the draft. */
export function ContextGauge({ place, model }: { place: string; model: string }) {
  const t = labels.value.chat;
  const draft = useDraftTokens(place, model);
  const most = props.value.default_generation_settings?.n_ctx;
  const stats = shownPath.value.findLast((one) => one.stats)?.stats;
  const used = (stats ? stats.promptTokens + stats.tokens : 0) + draft;
  if (!used) return null;
  const percent = most ? Math.min(100, Math.round((used / most) * 100)) : 0;
  return (
    <span class={`context ${percent >= NEARLY_FULL ? "nearly" : ""}`} title={most ? t.contextUsed(used, most) : ""}>
      {most ? (
        <>
          <i aria-hidden="true" style={{ "--full": `${percent}%` }} />
          <span class="hidden">{t.context}</span>
          {percent}%
        </>
      ) : null}
      {draft > 0 && <span class="draft-tokens"> {t.draftTokens(draft)}</span>}
    </span>
  );
}
