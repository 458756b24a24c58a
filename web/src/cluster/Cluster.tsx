import { useEffect } from "preact/hooks";
import { apiKey } from "../api/http";
import { isKnown, isRouter } from "../api/server";
import { labels } from "../text";
import { language } from "../text/language";
import { Copy } from "../ui/Copy";
import { Figure, Figures } from "../ui/Figures";
import { RouterNotice } from "./RouterNotice";
import { formatBytes, formatDecimal, formatMs } from "../ui/format";
import { Rich } from "../ui/Rich";
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
      <h1 class="hidden">{labels.value.cluster.title}</h1>
      {isRouter.value && <RouterNotice view="cluster" />}
      {errorText.value && <p class="notice">{errorText.value}</p>}
      {body && (body.devices.length ? <SplitModel /> : <SingleMachine />)}
    </div>
  );
}

function SingleMachine() {
  const t = labels.value.cluster;
  return (
    <section class="start">
      <h2>{t.single}</h2>
      <p>{t.singleAbout}</p>
      <p>{t.trySplit}</p>
      <pre>
        <code tabIndex={0}>{START}</code> <Copy text={START} />
      </pre>
      <p>
        <Rich text={t.otherMachines} />
      </p>
    </section>
  );
}

function SplitModel() {
  const t = labels.value.cluster;
  const { devices, events, model } = cluster.value!;
  return (
    <>
      <Summary />
      <section>
        <h2>{t.layers}</h2>
        <p class="hint">
          {t.timeOf(model)} <span class="key predicted" /> {t.predicted}, <span class="key measured" /> {t.measured}. {t.dragHint}
        </p>
        <Lanes devices={devices} />
        <DraftBar />
      </section>
      <section>
        <h2>{t.machines}</h2>
        <Machines devices={devices} />
      </section>
      <section>
        <h2>{t.events}</h2>
        <Events events={events} />
      </section>
    </>
  );
}

function Summary() {
  const t = labels.value.cluster;
  const body = cluster.value!;
  const time = body.token_seconds;
  const measured = time && time.total > 0 ? time : null;
  return (
    <Figures label={t.timePerToken}>
      <Figure title={t.speed} value={measured ? formatDecimal(body.tokens_per_second ?? 0, 1) : "–"} more={t.speedUnit} />
      <Figure title={t.timePerToken} value={measured ? formatMs(measured.total) : "–"} more={t.lastMinute} />
      <Figure title={t.predictedTime} value={formatMs(body.predicted_seconds)} more={body.predicted_seconds === null && <MeasureButton />} />
      <Figure title={t.compute} value={measured ? formatMs(measured.compute) : "–"} />
      <Figure title={t.links} value={measured ? formatMs(measured.link) : "–"} />
    </Figures>
  );
}

/** A button that measures unknown speeds; measuring pauses answers. */
function MeasureButton() {
  const t = labels.value.cluster;
  const runs = busy.value === "predicting";
  return (
    <button
      class="quiet small"
      type="button"
      title={t.measureTitle}
      disabled={busy.value !== "" || draftLayout.value !== null}
      onClick={() => void measure()}
    >
      {runs ? t.measuring : t.measure}
    </button>
  );
}

/** Predicted time and memory of the draft layout, with buttons to apply or discard it. */
function DraftBar() {
  const t = labels.value.cluster;
  const found = prediction.value;
  const missing = found?.devices.filter((one) => one.memory.missing > 0) ?? [];
  const lost = cluster.value!.devices.filter((one) => (one.state === "lost" || one.state === "away") && draftLayout.value?.includes(one.device));
  const before = cluster.value!.predicted_seconds;
  return (
    <div class="draft-bar" role="status">
      {draftLayout.value && (
        <>
          <span class="result">
            {busy.value === "predicting" && t.predicting}
            {busy.value === "moving" && t.moving}
            {busy.value === "" && found && `${describeDraft(found.seconds, before)}.`}
            {missing.map((one) => (
              <em key={one.device}>
                {" "}
                {t.needsMemory(shortName(one.device), formatBytes(one.memory.missing))}
              </em>
            ))}
            {lost.map((one) => (
              <em key={one.device}> {t.notConnected(shortName(one.device))}</em>
            ))}
            {draftError.value && <em> {draftError.value}</em>}
          </span>
          <button
            class="primary"
            type="button"
            disabled={busy.value !== "" || missing.length > 0 || lost.length > 0}
            onClick={() => void applyDraft()}
          >
            {t.apply}
          </button>
          <button type="button" disabled={busy.value === "moving"} onClick={discardDraft}>
            {t.discard}
          </button>
        </>
      )}
    </div>
  );
}

function describeDraft(seconds: number | null, before: number | null): string {
  const rate = seconds === null ? "" : formatDecimal(1 / seconds, 1);
  const time = labels.value.cluster.draftTime(formatMs(seconds), rate);
  return seconds === null || before === null ? time : `${time}, ${describeChange(before, seconds)}`;
}

function describeChange(before: number, after: number): string {
  const t = labels.value.cluster;
  const part = after / before - 1;
  if (Math.abs(part) < 0.005) return t.sameAsNow;
  const percent = formatDecimal(Math.abs(100 * part), 0);
  return part < 0 ? t.lessThanNow(percent) : t.moreThanNow(percent);
}

function Events({ events }: { events: ClusterEvent[] }) {
  if (!events.length) return <p class="hint">{labels.value.cluster.noEvents}</p>;
  return (
    <ol class="events">
      {[...events]
        .reverse()
        .slice(0, 40)
        .map((event) => (
          <li key={`${event.at} ${event.device} ${event.kind}`} class={event.kind}>
            <time dateTime={new Date(1e3 * event.at).toISOString()}>{new Date(1e3 * event.at).toLocaleTimeString(language.value)}</time>
            <strong>{labels.value.cluster.eventKinds[event.kind]}</strong> {event.device}: {event.what}
          </li>
        ))}
    </ol>
  );
}
