import { useEffect } from "preact/hooks";
import { apiKey } from "../api/http";
import { isKnown, isRouter } from "../api/server";
import { Copy } from "../ui/Copy";
import { Figure, Figures } from "../ui/Figures";
import { RouterNotice } from "./RouterNotice";
import { formatBytes, formatMs } from "../ui/format";
import { shortName } from "./layout";
import { Lanes } from "./Lanes";
import { Machines } from "./Machines";
import type { ClusterEvent } from "../api/schema";
import { applyDraft, busy, cluster, discardDraft, draftLayout, measure, prediction, draftError, errorText, watchCluster } from "./state";
import "./cluster.css";

const START = "llamado up --nodes 3";

/** The cluster view: machines, their layers, and the time of a token. */
export function Cluster() {
  const key = apiKey.value;
  const isSingleServer = isKnown.value && !isRouter.value;
  useEffect(() => (isSingleServer ? watchCluster() : undefined), [key, isSingleServer]);
  const body = isSingleServer ? cluster.value : null;
  return (
    <div class="cluster">
      <h1 class="hidden">Cluster</h1>
      {isRouter.value && <RouterNotice view="cluster" />}
      {errorText.value && <p class="notice">{errorText.value}</p>}
      {body && (body.devices.length ? <SplitModel /> : <SingleMachine />)}
    </div>
  );
}

function SingleMachine() {
  return (
    <section class="start">
      <h2>The model runs on this machine only</h2>
      <p>
        If it is split over several machines, this view shows the layers of each one, its link, the predicted and measured time per token, and
        events such as lost workers. You can then drag layers from one machine to another while answers continue.
      </p>
      <p>Try it with three processes on this machine:</p>
      <pre>
        <code>{START}</code> <Copy text={START} />
      </pre>
      <p>
        To use other machines, run <code>llamado worker -H 0.0.0.0</code> on each, and <code>llamado serve --rpc HOST</code> here.
      </p>
    </section>
  );
}

function SplitModel() {
  const { devices, events, model } = cluster.value!;
  return (
    <>
      <Summary />
      <section>
        <h2>Layers</h2>
        <p class="hint">
          Time per token of {model}: <span class="key predicted" /> predicted, <span class="key measured" /> measured in the last minute. Drag
          layers to another lane, or move borders with + and −.
        </p>
        <Lanes devices={devices} />
        <DraftBar />
      </section>
      <section>
        <h2>Machines</h2>
        <Machines devices={devices} />
      </section>
      <section>
        <h2>Events</h2>
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
    <Figures label="Time per token">
      <Figure title="Speed" value={measured ? (body.tokens_per_second ?? 0).toFixed(1) : "–"} more="tokens/s, last minute" />
      <Figure title="Time per token, measured" value={measured ? formatMs(measured.total) : "–"} />
      <Figure title="Time per token, predicted" value={formatMs(body.predicted_seconds)} more={body.predicted_seconds === null && <MeasureButton />} />
      <Figure title="Compute" value={measured ? formatMs(measured.compute) : "–"} />
      <Figure title="Links" value={measured ? formatMs(measured.link) : "–"} />
    </Figures>
  );
}

/** A button that measures unknown speeds; measuring pauses answers. */
function MeasureButton() {
  const runs = busy.value === "predicting";
  return (
    <button
      class="quiet small"
      type="button"
      title="Measure unknown speeds; answers pause for up to two seconds"
      disabled={busy.value !== "" || draftLayout.value !== null}
      onClick={() => void measure()}
    >
      {runs ? "Measuring…" : "Measure"}
    </button>
  );
}

/** Predicted time and memory of the draft layout, with buttons to apply or discard it. */
function DraftBar() {
  const found = prediction.value;
  const missing = found?.devices.filter((one) => one.memory.missing > 0) ?? [];
  const lost = cluster.value!.devices.filter((one) => (one.state === "lost" || one.state === "away") && draftLayout.value?.includes(one.device));
  const before = cluster.value!.predicted_seconds;
  return (
    <div class="draft-bar" role="status">
      {draftLayout.value && (
        <>
          <span class="result">
            {busy.value === "predicting" && "Predicting…"}
            {busy.value === "moving" && "Moving layers…"}
            {busy.value === "" && found && (
              <>
                This layout takes <strong>{formatMs(found.seconds)}</strong> per token
                {found.seconds !== null && ` (${(1 / found.seconds).toFixed(1)} tokens/s)`}
                {found.seconds !== null && before !== null && `, ${describeChange(before, found.seconds)}`}.
              </>
            )}
            {missing.map((one) => (
              <em key={one.device}>
                {" "}
                {shortName(one.device)} needs {formatBytes(one.memory.missing)} more memory.
              </em>
            ))}
            {lost.map((one) => (
              <em key={one.device}> {shortName(one.device)} is not connected.</em>
            ))}
            {draftError.value && <em> {draftError.value}</em>}
          </span>
          <button
            class="primary"
            type="button"
            disabled={busy.value !== "" || missing.length > 0 || lost.length > 0}
            onClick={() => void applyDraft()}
          >
            Apply
          </button>
          <button type="button" disabled={busy.value === "moving"} onClick={discardDraft}>
            Discard
          </button>
        </>
      )}
    </div>
  );
}

function describeChange(before: number, after: number): string {
  const part = after / before - 1;
  if (Math.abs(part) < 0.005) return "same as now";
  return `${Math.abs(100 * part).toFixed(0)}% ${part < 0 ? "less" : "more"} than now`;
}

function Events({ events }: { events: ClusterEvent[] }) {
  if (!events.length) return <p class="hint">No events in the last hour.</p>;
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
