import { useSignal } from "@preact/signals";
import { formatClock, formatCount, formatRate, formatSeconds } from "../ui/format";
import { phases, type LiveRequest, type LiveState } from "./state";
import { TimeWindow, type Window } from "./TimeWindow";

const WINDOWS: Window[] = [
  [30, "30 seconds"],
  [60, "1 minute"],
  [300, "5 minutes"],
  [0, "last 100 requests"],
];

/** Return the state or the result of a request, and its severity. */
export function requestResult(one: LiveRequest): [words: string, kind: "now" | "good" | "warn" | "bad"] {
  if (one.seconds === undefined) {
    const words = one.first != null ? "generating" : one.slots?.length ? "prompt" : "queued";
    return [words, "now"];
  }
  if (one.stop === "cancelled") return ["client disconnected", "warn"];
  if ((one.status ?? 0) >= 400) return [one.reason || `status ${one.status}`, "bad"];
  const why: Record<string, string> = { eos: "end of answer", limit: "token limit", word: "stop sequence", none: "done" };
  return [(one.stop ?? "").split(", ").map((stop) => why[stop] ?? stop).join(", ") || "done", "good"];
}

function Row({ one, now, from, span }: { one: LiveRequest; now: number; from: number; span: number }) {
  const length = one.seconds ?? Math.max(0, now - one.at);
  const [words, kind] = requestResult(one);
  const parts = phases(one, length);
  const durations = parts.map((part) => `${part.phase} ${formatSeconds(part.to - part.from)}`).join(", ");
  return (
    <tr class={kind === "now" ? "running" : ""} data-request={one.id}>
      <td>{formatClock(one.at).slice(0, 8)}</td>
      <td class="path">{one.path}</td>
      <td>{one.client || "socket"}</td>
      <td class="number">{one.prompt ? `${formatCount(one.prompt)} + ${formatCount(one.predicted ?? 0)}` : ""}</td>
      <td class="number">{one.rate ? formatRate(one.rate) : ""}</td>
      <td class="time">
        <div class="track" role="img" aria-label={`${formatSeconds(length)}: ${durations}`} title={`${formatSeconds(length)}: ${durations}${one.cached ? `; ${formatCount(one.cached)} tokens from the cache` : ""}`}>
          {parts.map((part) => {
            const left = Math.max(0, ((one.at + part.from - from) / span) * 100);
            const right = Math.min(100, ((one.at + part.to - from) / span) * 100);
            return right > left ? (
              <i key={part.phase} class={part.phase} style={{ left: `${left}%`, width: `max(2px, ${right - left}%)` }} />
            ) : null;
          })}
        </div>
      </td>
      <td class={`outcome ${kind}`} title={one.model}>
        {one.status && one.status !== 200 ? `${one.status} ` : ""}
        {words}
      </td>
    </tr>
  );
}

/** The latest requests over time: queue, prompt and generation. */
export function Waterfall({ live, now }: { live: LiveState; now: number }) {
  const chosen = useSignal(60);
  const all = [...live.ended, ...(live.running ?? [])].sort((a, b) => b.at - a.at);
  const span = chosen.value || Math.max(10, now - Math.min(now, ...all.map((one) => one.at)));
  const from = now - span;
  const shown = all.filter((one) => one.seconds === undefined || one.at + one.seconds >= from);
  return (
    <section aria-labelledby="live-requests">
      <div class="section-head">
        <h2 id="live-requests">Requests</h2>
        <span class="legend">
          <i class="queue" /> queue <i class="prompt" /> prompt <i class="generation" /> generation
        </span>
        <TimeWindow title="Time shown" windows={WINDOWS} chosen={chosen} />
      </div>
      {/* Focusable, so that the keyboard can scroll it. */}
      <div class="waterfall" tabIndex={0} role="region" aria-label="Requests over time">
        <table>
          <thead>
            <tr>
              <th scope="col">Started</th>
              <th scope="col">Endpoint</th>
              <th scope="col">Client</th>
              <th scope="col" class="number">Tokens</th>
              <th scope="col" class="number">Tokens/s</th>
              <th scope="col" class="time">
                {chosen.value ? `Last ${WINDOWS.find(([value]) => value === chosen.value)![1]}` : `Last ${formatSeconds(span)}`}
              </th>
              <th scope="col">Result</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((one) => (
              <Row key={one.number} one={one} now={now} from={from} span={span} />
            ))}
          </tbody>
        </table>
        {!shown.length && <p class="nothing">{all.length ? `No requests in this period; ${all.length} earlier.` : "No requests yet."}</p>}
      </div>
    </section>
  );
}
