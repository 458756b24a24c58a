import { Figure, Figures } from "../ui/Figures";
import { CacheEntries as Entries } from "./CacheEntries";
import { bytes, count, seconds, short } from "./format";
import type { Known } from "./state";

const AVERAGED = 5; // seconds

function lately(values: (number | null)[]): number | null {
  const known = values.slice(-AVERAGED).filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** The numbers that people look for first. */
export function Tiles({ known }: { known: Known }) {
  const { samples, cells } = known;
  const slots = known.slots ?? [];
  const last = samples.first_token.findLast((value) => value !== null);
  return (
    <Figures label="Now">
      <Figure title="Answers" value={short(lately(samples.answer) ?? 0)} more="tokens/s" />
      <Figure title="Prompts" value={short(lately(samples.prompt) ?? 0)} more="tokens/s" />
      <Figure title="Slots at work" value={`${slots.filter((slot) => slot.busy).length}`} more={`of ${slots.length}`} />
      <Figure title="Waiting" value={count(known.waiting ?? 0)} more="requests" />
      {known.counts && <Figure title="Cancelled" value={count(known.counts.cancelled)} more={`of ${count(known.counts.ended)} ended`} />}
      <Figure title="First token" value={last == null ? "–" : seconds(last)} />
      <Figure
        title="K/V cells"
        value={cells?.total ? `${Math.round((cells.used / cells.total) * 100)}%` : "–"}
        more={cells?.total ? `of ${count(cells.total)}${cells.shared ? `, ${count(cells.shared)} shared` : ""}` : ""}
      />
    </Figures>
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
      <Figures label="Prompt cache">
        <Figure title="Prompts in memory" value={count(cache.prompts)} more="and those in slots" />
        <Figure title="Their tokens" value={count(cache.tokens)} />
        <Figure title="Their memory" value={bytes(cache.bytes)} />
        <Figure
          title="Hits"
          value={asked ? `${Math.round((cache.hit_tokens / asked) * 100)}%` : "–"}
          more={asked ? `${count(cache.hit_tokens)} of ${count(asked)} tokens` : "nothing was asked"}
        />
        {cache.disk && (
          <>
            <Figure title="Files on disk" value={count(cache.disk.files)} more={bytes(cache.disk.bytes)} />
            <Figure title="Hits on disk" value={count(cache.disk.hits)} more={`${count(cache.disk.tokens_read)} tokens`} />
          </>
        )}
      </Figures>
      <Entries cache={cache} ahead={known.ahead} />
    </section>
  );
}
