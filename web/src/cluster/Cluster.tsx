import { useEffect } from "preact/hooks";
import { apiKey } from "../api/http";
import { isKnown, isRouter } from "../api/server";
import { Copy } from "../ui/Copy";
import { Figure, Figures } from "../ui/Figures";
import { BehindRouter } from "./BehindRouter";
import { bytes, ms, shortName } from "./figures";
import { Lanes } from "./Lanes";
import { Machines } from "./Machines";
import type { ClusterEvent } from "./schema";
import { apply, busy, cluster, discard, draft, measure, prediction, refused, trouble, watch } from "./state";
import "./cluster.css";

const START = "llamado up --nodes 3";

/** The machines a model is divided among: who is there, who has what, where a token's time goes. */
export function Cluster() {
  const key = apiKey.value;
  const asked = isKnown.value && !isRouter.value;
  useEffect(() => (asked ? watch() : undefined), [key, asked]);
  const body = asked ? cluster.value : null;
  return (
    <div class="cluster">
      <h1 class="hidden">Cluster</h1>
      {isRouter.value && <BehindRouter what="cluster" />}
      {trouble.value && <p class="notice">{trouble.value}</p>}
      {body && (body.devices.length ? <Divided /> : <Alone />)}
    </div>
  );
}

function Alone() {
  return (
    <section class="start">
      <h2>The model is on this machine alone</h2>
      <p>
        With workers beside it, this shows each machine and its link, which layers it has, what a token should take there and takes, and who
        comes and goes. Layers can then be dragged from one machine to another while answers go on.
      </p>
      <p>Three processes on this machine, to see what it is like:</p>
      <pre>
        <code>{START}</code> <Copy text={START} />
      </pre>
      <p>
        Other machines run <code>llamado worker -H 0.0.0.0</code>, and this one <code>llamado serve --rpc HOST</code>.
      </p>
    </section>
  );
}

function Divided() {
  const { devices, events, model } = cluster.value!;
  return (
    <>
      <Summary />
      <section>
        <h2>Layers</h2>
        <p class="hint">
          <span class="key predicted" /> predicted, <span class="key measured" /> measured in the last minute, for a token of {model}. Drag layers to
          another lane, or move borders with + and −.
        </p>
        <Lanes devices={devices} />
        <Trial />
      </section>
      <section>
        <h2>Machines</h2>
        <Machines devices={devices} />
      </section>
      <section>
        <h2>What happened</h2>
        <Events events={events} />
      </section>
    </>
  );
}

function Summary() {
  const body = cluster.value!;
  const time = body.token_seconds;
  const measured = time && time.total > 0 ? time : null;
  return (
    <Figures label="A token's time">
      <Figure title="Answers" value={measured ? (body.tokens_per_second ?? 0).toFixed(1) : "–"} more="tokens/s, last minute" />
      <Figure title="A token, measured" value={measured ? ms(measured.total) : "–"} />
      <Figure title="A token, predicted" value={ms(body.predicted_seconds)} more={body.predicted_seconds === null && <Measure />} />
      <Figure title="of it computing" value={measured ? ms(measured.compute) : "–"} />
      <Figure title="of it on links" value={measured ? ms(measured.link) : "–"} />
    </Figures>
  );
}

/** Where speeds are not known, they are measured when somebody wants to know. */
function Measure() {
  const runs = busy.value === "predicting";
  return (
    <button
      class="quiet small"
      type="button"
      title="Measures what no one has measured yet; answers wait for up to two seconds"
      disabled={busy.value !== "" || draft.value !== null}
      onClick={() => void measure()}
    >
      {runs ? "Measuring…" : "Measure"}
    </button>
  );
}

/** What the layout that is tried out would take, and the buttons that make it so. */
function Trial() {
  const found = prediction.value;
  const missing = found?.devices.filter((one) => one.memory.missing > 0) ?? [];
  const gone = cluster.value!.devices.filter((one) => (one.state === "lost" || one.state === "away") && draft.value?.includes(one.device));
  const before = cluster.value!.predicted_seconds;
  return (
    <div class="trial" role="status">
      {draft.value && (
        <>
          <span class="said">
            {busy.value === "predicting" && "Asking what that would take…"}
            {busy.value === "moving" && "Layers are moved…"}
            {busy.value === "" && found && (
              <>
                With this layout a token takes <strong>{ms(found.seconds)}</strong>
                {found.seconds !== null && ` (${(1 / found.seconds).toFixed(1)} tokens/s)`}
                {found.seconds !== null && before !== null && `, ${change(before, found.seconds)}`}.
              </>
            )}
            {missing.map((one) => (
              <em key={one.device}>
                {" "}
                {shortName(one.device)} would lack {bytes(one.memory.missing)} of memory.
              </em>
            ))}
            {gone.map((one) => (
              <em key={one.device}> {shortName(one.device)} is not there.</em>
            ))}
            {refused.value && <em> {refused.value}</em>}
          </span>
          <button
            class="primary"
            type="button"
            disabled={busy.value !== "" || missing.length > 0 || gone.length > 0}
            onClick={() => void apply()}
          >
            Apply
          </button>
          <button type="button" disabled={busy.value === "moving"} onClick={discard}>
            Discard
          </button>
        </>
      )}
    </div>
  );
}

function change(before: number, after: number): string {
  const part = after / before - 1;
  if (Math.abs(part) < 0.005) return "as now";
  return `${Math.abs(100 * part).toFixed(0)}% ${part < 0 ? "less" : "more"} than now`;
}

function Events({ events }: { events: ClusterEvent[] }) {
  if (!events.length) return <p class="hint">Nobody came or went in the last hour.</p>;
  return (
    <ol class="events">
      {[...events]
        .reverse()
        .slice(0, 40)
        .map((event) => (
          <li key={`${event.at} ${event.device} ${event.kind}`} class={event.kind}>
            <time dateTime={new Date(1e3 * event.at).toISOString()}>{new Date(1e3 * event.at).toLocaleTimeString()}</time>
            <strong>{event.kind}</strong> {event.device}: {event.what}
          </li>
        ))}
    </ol>
  );
}
