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
  const { samples, cells } = live;
  const slots = live.slots ?? [];
  const last = samples.first_token.findLast((value) => value !== null);
  return (
    <Figures label="Now">
      <Figure title="Generation" value={formatRate(recentAverage(samples.answer) ?? 0)} more="tokens/s" />
      <Figure title="Prompts" value={formatRate(recentAverage(samples.prompt) ?? 0)} more="tokens/s" />
      <Figure title="Busy slots" value={`${slots.filter((slot) => slot.busy).length}`} more={`of ${slots.length}`} />
      <Figure title="Queued" value={formatCount(live.waiting ?? 0)} more="requests" />
      {live.counts && <Figure title="Canceled" value={formatCount(live.counts.cancelled)} more={`of ${formatCount(live.counts.ended)} finished`} />}
      <Figure title="Time to first token" value={last == null ? "–" : formatSeconds(last)} />
      <Figure
        title="KV cells"
        value={cells?.total ? `${Math.round((cells.used / cells.total) * 100)}%` : "–"}
        more={cells?.total ? `of ${formatCount(cells.total)}${cells.shared ? `, ${formatCount(cells.shared)} shared` : ""}` : ""}
      />
    </Figures>
  );
}

/** Contents and hits of the prompt cache. */
export function CacheTiles({ live }: { live: LiveState }) {
  const cache = live.cache;
  if (!cache) return null;
  const promptTokens = cache.hit_tokens + cache.computed_tokens;
  return (
    <section aria-labelledby="live-cache">
      <h2 id="live-cache">Prompt cache</h2>
      <Figures label="Prompt cache">
        <Figure title="Prompts in memory" value={formatCount(cache.prompts)} more="plus those in slots" />
        <Figure title="Tokens" value={formatCount(cache.tokens)} />
        <Figure title="Memory" value={formatBytes(cache.bytes)} />
        <Figure
          title="Hits"
          value={promptTokens ? `${Math.round((cache.hit_tokens / promptTokens) * 100)}%` : "–"}
          more={promptTokens ? `${formatCount(cache.hit_tokens)} of ${formatCount(promptTokens)} tokens` : "no prompts yet"}
        />
        {cache.disk && (
          <>
            <Figure title="Files on disk" value={formatCount(cache.disk.files)} more={formatBytes(cache.disk.bytes)} />
            <Figure title="Hits on disk" value={formatCount(cache.disk.hits)} more={`${formatCount(cache.disk.tokens_read)} tokens`} />
          </>
        )}
      </Figures>
      <Entries cache={cache} ahead={live.ahead} />
    </section>
  );
}
