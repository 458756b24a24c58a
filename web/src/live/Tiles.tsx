import { CacheEntries as Entries } from "./CacheEntries";
import { bytes, count, seconds, short } from "./format";
import type { Known } from "./state";

const AVERAGED = 5; // seconds

function lately(values: (number | null)[]): number | null {
  const known = values.slice(-AVERAGED).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function Tile({ title, value, more = "" }: { title: string; value: string; more?: string | undefined }) {
  return (
    <div class="tile">
      <dt>{title}</dt>
      <dd>
        <b>{value}</b> {more}
      </dd>
    </div>
  );
}

/** The numbers that people look for first. */
export function Tiles({ known }: { known: Known }) {
  const { samples, cells } = known;
  const slots = known.slots ?? [];
  const last = samples.first_token.findLast((value) => value !== null);
  return (
    <dl class="tiles" aria-label="Now">
      <Tile title="Answers" value={short(lately(samples.answer) ?? 0)} more="tokens/s" />
      <Tile title="Prompts" value={short(lately(samples.prompt) ?? 0)} more="tokens/s" />
      <Tile title="Slots at work" value={`${slots.filter((slot) => slot.busy).length}`} more={`of ${slots.length}`} />
      <Tile title="Waiting" value={count(known.waiting ?? 0)} more="requests" />
      {known.counts && <Tile title="Cancelled" value={count(known.counts.cancelled)} more={`of ${count(known.counts.ended)} ended`} />}
      <Tile title="First token" value={last == null ? "–" : seconds(last)} />
      <Tile
        title="K/V cells"
        value={cells?.total ? `${Math.round((cells.used / cells.total) * 100)}%` : "–"}
        more={cells?.total ? `of ${count(cells.total)}${cells.shared ? `, ${count(cells.shared)} shared` : ""}` : ""}
      />
    </dl>
  );
}

/** What is kept of prompts, and what it was good for. */
export function CacheTiles({ known }: { known: Known }) {
  const cache = known.cache;
  if (!cache) return null;
  const asked = cache.hit_tokens + cache.computed_tokens;
  return (
    <section aria-labelledby="live-cache">
      <h2 id="live-cache">Prompt cache</h2>
      <dl class="tiles">
        <Tile title="Prompts in memory" value={count(cache.prompts)} more="and those in slots" />
        <Tile title="Their tokens" value={count(cache.tokens)} />
        <Tile title="Their memory" value={bytes(cache.bytes)} />
        <Tile
          title="Hits"
          value={asked ? `${Math.round((cache.hit_tokens / asked) * 100)}%` : "–"}
          more={asked ? `${count(cache.hit_tokens)} of ${count(asked)} tokens` : "nothing was asked"}
        />
        {cache.disk && (
          <>
            <Tile title="Files on disk" value={count(cache.disk.files)} more={bytes(cache.disk.bytes)} />
            <Tile title="Hits on disk" value={count(cache.disk.hits)} more={`${count(cache.disk.tokens_read)} tokens`} />
          </>
        )}
      </dl>
      <Entries cache={cache} ahead={known.ahead} />
    </section>
  );
}
