import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { getJson } from "../api/http";
import { bytes, count, seconds } from "./format";
import type { Cache } from "./state";

interface Entry {
  tokens: number;
  bytes: number;
  /** When it was last of use, in seconds since 1970. */
  used: number;
  /** How it begins; missing where the server shows no prompts. */
  text?: string;
}

/** The prompts that the cache holds; asked for while they are unfolded, when what it holds has changed. */
export function CacheEntries({ cache, ahead }: { cache: Cache; ahead: number }) {
  const open = useSignal(false);
  const entries = useSignal<Entry[] | null>(null);
  const trouble = useSignal("");
  useEffect(() => {
    if (!open.value) return;
    const stop = new AbortController();
    getJson<{ entries: Entry[] }>("live/cache", stop.signal).then(
      (told) => {
        entries.value = told.entries;
        trouble.value = "";
      },
      (error: Error) => {
        if (!stop.signal.aborted) trouble.value = error.message;
      },
    );
    return () => stop.abort();
  }, [open.value, cache.prompts, cache.tokens, cache.hit_tokens]);
  const now = Date.now() / 1000 + ahead;
  return (
    <details class="cache-entries" onToggle={(event) => (open.value = event.currentTarget.open)}>
      <summary>What it holds</summary>
      {trouble.value && <p class="notice">{trouble.value}</p>}
      {entries.value && !entries.value.length && <p class="nothing">Nothing beside what slots hold.</p>}
      {entries.value && entries.value.length > 0 && (
        <div class="waterfall" tabIndex={0} role="region" aria-label="Prompts in the cache">
          <table>
            <thead>
              <tr>
                <th scope="col">Tokens</th>
                <th scope="col">Memory</th>
                <th scope="col">Last of use</th>
                <th scope="col">Begins with</th>
              </tr>
            </thead>
            <tbody>
              {entries.value.map((one) => (
                <tr key={`${one.used} ${one.tokens}`}>
                  <td class="number">{count(one.tokens)}</td>
                  <td class="number">{bytes(one.bytes)}</td>
                  <td class="number">{seconds(Math.max(0, now - one.used))} ago</td>
                  <td class="begins">{one.text ?? "not shown: the server has --no-slots"}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </details>
  );
}
