import { labels } from "../text";
import { Figure, Figures } from "../ui/Figures";
import { CacheEntries as Entries } from "./CacheEntries";
import { formatBytes, formatCount, formatRate, formatSeconds } from "../ui/format";
import type { LiveState } from "./state";

const AVERAGED_SECONDS = 5; // seconds

function recentAverage(values: (number | null)[]): number | null {
  const present = values.slice(-AVERAGED_SECONDS).filter((value) => value !== null);
  return present.length ? present.reduce((sum, value) => sum + value, 0) / present.length : null;
}

/** Key figures of the server. */
export function Tiles({ live }: { live: LiveState }) {
  const t = labels.value.live;
  const { tokensPerSecond } = labels.value.common;
  const { samples, cells } = live;
  const slots = live.slots ?? [];
  const last = samples.first_token.findLast((value) => value !== null);
  return (
    <Figures label={t.now}>
      <Figure title={t.generation} value={formatRate(recentAverage(samples.answer) ?? 0)} more={tokensPerSecond} />
      <Figure title={t.prompts} value={formatRate(recentAverage(samples.prompt) ?? 0)} more={tokensPerSecond} />
      <Figure title={t.busySlots} value={`${slots.filter((slot) => slot.busy).length}`} more={t.of(slots.length)} />
      <Figure title={t.waiting} value={formatCount(live.waiting ?? 0)} more={t.requestsUnit} />
      {live.counts && <Figure title={t.canceled} value={formatCount(live.counts.cancelled)} more={t.ofFinished(live.counts.ended)} />}
      <Figure title={t.timeToFirstToken} value={last == null ? "–" : formatSeconds(last)} />
      <Figure
        title={t.kvCells}
        value={cells?.total ? `${Math.round((cells.used / cells.total) * 100)}%` : "–"}
        more={cells?.total ? t.cells(cells.total, cells.shared) : ""}
      />
    </Figures>
  );
}

/** Contents and hits of the prompt cache. */
export function CacheTiles({ live }: { live: LiveState }) {
  const cache = live.cache;
  if (!cache) return null;
  const t = labels.value.live;
  const promptTokens = cache.hit_tokens + cache.computed_tokens;
  return (
    <section aria-labelledby="live-cache">
      <h2 id="live-cache">{t.cache}</h2>
      <Figures label={t.cache}>
        <Figure title={t.promptsInMemory} value={formatCount(cache.prompts)} more={t.plusSlots} />
        <Figure title={t.tokens} value={formatCount(cache.tokens)} />
        <Figure title={t.memory} value={formatBytes(cache.bytes)} />
        <Figure
          title={t.hits}
          value={promptTokens ? `${Math.round((cache.hit_tokens / promptTokens) * 100)}%` : "–"}
          more={promptTokens ? t.hitTokens(cache.hit_tokens, promptTokens) : t.noPrompts}
        />
        {cache.disk && (
          <>
            <Figure title={t.diskFiles} value={formatCount(cache.disk.files)} more={formatBytes(cache.disk.bytes)} />
            <Figure title={t.diskHits} value={formatCount(cache.disk.hits)} more={labels.value.common.tokens(cache.disk.tokens_read)} />
          </>
        )}
      </Figures>
      <Entries cache={cache} ahead={live.ahead} />
    </section>
  );
}
