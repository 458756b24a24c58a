import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { getJson } from "../api/http";
import { labels } from "../text";
import { formatBytes, formatCount, formatSeconds } from "../ui/format";
import type { Cache } from "./state";

interface Entry {
  tokens: number;
  bytes: number;
  /** Time of the last use, in seconds since 1970. */
  used: number;
  /** Its first words; missing if the server was started with --no-slots. */
  text?: string;
}

/** Prompts in the cache; loaded while the list is unfolded, whenever the cache has changed. */
export function CacheEntries({ cache, ahead }: { cache: Cache; ahead: number }) {
  const t = labels.value.live;
  const open = useSignal(false);
  const entries = useSignal<Entry[] | null>(null);
  const errorText = useSignal("");
  useEffect(() => {
    if (!open.value) return;
    const stop = new AbortController();
    getJson<{ entries: Entry[] }>("live/cache", stop.signal).then(
      (body) => {
        entries.value = body.entries;
        errorText.value = "";
      },
      (error: Error) => {
        if (!stop.signal.aborted) errorText.value = error.message;
      },
    );
    return () => stop.abort();
  }, [open.value, cache.prompts, cache.tokens, cache.hit_tokens]);
  const now = Date.now() / 1000 + ahead;
  return (
    <details class="cache-entries" onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>{t.contents}</summary>
      {errorText.value && <p class="notice">{errorText.value}</p>}
      {entries.value && !entries.value.length && <p class="nothing">{t.cacheEmpty}</p>}
      {entries.value && entries.value.length > 0 && (
        <div class="waterfall" tabIndex={0} role="region" aria-label={t.cachedPrompts}>
          <table>
            <thead>
              <tr>
                <th scope="col">{t.tokens}</th>
                <th scope="col">{t.memory}</th>
                <th scope="col">{t.lastUsed}</th>
                <th scope="col">{t.beginsWith}</th>
              </tr>
            </thead>
            <tbody>
              {entries.value.map((one) => (
                <tr key={`${one.used} ${one.tokens}`}>
                  <td class="number">{formatCount(one.tokens)}</td>
                  <td class="number">{formatBytes(one.bytes)}</td>
                  <td class="number">{t.ago(formatSeconds(Math.max(0, now - one.used)))}</td>
                  <td class="begins">{one.text ?? t.hiddenText}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </details>
  );
}
