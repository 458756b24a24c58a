import { useSignal } from "@preact/signals";
import { type Catalogue, labels } from "../text";
import { formatClock, formatCount, formatRate, formatSeconds } from "../ui/format";
import { phases, type LiveRequest, type LiveState } from "./state";
import { TimeWindow, type Window } from "./TimeWindow";

function timeWindows(t: Catalogue["live"]): Window[] {
  return [
    [30, t.seconds(30)],
    [60, t.minutes(1)],
    [300, t.minutes(5)],
    [0, t.lastRequests(100)],
  ];
}

/** Return the state or the result of a request, and its severity. */
export function requestResult(one: LiveRequest): [words: string, kind: "now" | "good" | "warn" | "bad"] {
  const t = labels.value.live.results;
  if (one.seconds === undefined) {
    const words = one.first != null ? t.generating : one.slots?.length ? t.prompt : t.waiting;
    return [words, "now"];
  }
  if (one.stop === "cancelled") return [t.disconnected, "warn"];
  if ((one.status ?? 0) >= 400) return [one.reason || t.status(one.status), "bad"];
  const { stops } = labels.value.live;
  return [(one.stop ?? "").split(", ").map((stop) => stops[stop] ?? stop).join(", ") || t.done, "good"];
}

function Row({ one, now, from, span }: { one: LiveRequest; now: number; from: number; span: number }) {
  const t = labels.value.live;
  const length = one.seconds ?? Math.max(0, now - one.at);
  const [words, kind] = requestResult(one);
  const parts = phases(one, length);
  const durations = parts.map((part) => `${t.phases[part.phase]} ${formatSeconds(part.to - part.from)}`).join(", ");
  return (
    <tr class={kind === "now" ? "running" : ""} data-request={one.id}>
      <td>{formatClock(one.at).slice(0, 8)}</td>
      <td class="path">{one.path}</td>
      <td>{one.client || t.socket}</td>
      <td class="number">{one.prompt ? `${formatCount(one.prompt)} + ${formatCount(one.predicted ?? 0)}` : ""}</td>
      <td class="number">{one.rate ? formatRate(one.rate) : ""}</td>
      <td class="time">
        <div class="track" role="img" aria-label={`${formatSeconds(length)}: ${durations}`} title={`${formatSeconds(length)}: ${durations}${one.cached ? `; ${t.cachedTokens(one.cached)}` : ""}`}>
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
  const t = labels.value.live;
  const windows = timeWindows(t);
  const chosen = useSignal(60);
  const all = [...live.ended, ...(live.running ?? [])].sort((a, b) => b.at - a.at);
  const span = chosen.value || Math.max(10, now - Math.min(now, ...all.map((one) => one.at)));
  const from = now - span;
  const shown = all.filter((one) => one.seconds === undefined || one.at + one.seconds >= from);
  return (
    <section aria-labelledby="live-requests">
      <div class="section-head">
        <h2 id="live-requests">{t.requests}</h2>
        <span class="legend">
          <i class="queue" /> {t.phases.queue} <i class="prompt" /> {t.phases.prompt} <i class="generation" /> {t.phases.generation}
        </span>
        <TimeWindow title={t.timeShown} windows={windows} chosen={chosen} />
      </div>
      {/* Focusable, so that the keyboard can scroll it. */}
      <div class="waterfall" tabIndex={0} role="region" aria-label={t.requestTable}>
        <table>
          <thead>
            <tr>
              <th scope="col">{t.columns.started}</th>
              <th scope="col">{t.columns.endpoint}</th>
              <th scope="col">{t.columns.client}</th>
              <th scope="col" class="number">{t.columns.tokens}</th>
              <th scope="col" class="number">{t.columns.rate}</th>
              <th scope="col" class="time">
                {t.lastTime(chosen.value ? windows.find(([value]) => value === chosen.value)![1] : formatSeconds(span))}
              </th>
              <th scope="col">{t.columns.result}</th>
            </tr>
          </thead>
          <tbody>
            {shown.map((one) => (
              <Row key={one.number} one={one} now={now} from={from} span={span} />
            ))}
          </tbody>
        </table>
        {!shown.length && <p class="nothing">{all.length ? t.noneInPeriod(all.length) : t.noRequests}</p>}
      </div>
    </section>
  );
}
