import { useEffect } from "preact/hooks";
import { apiKey, getJson } from "../api/http";
import { health, isKnown, isRouter } from "../api/server";
import { RouterNotice } from "../cluster/RouterNotice";
import { describeLayers, shortName } from "../cluster/layout";
import type { LabBody, LabLink } from "../api/schema";
import { cluster, currentLayout, watchCluster } from "../cluster/state";
import { labels } from "../text";
import { Copy } from "../ui/Copy";
import { Figure, Figures } from "../ui/Figures";
import { formatDecimal } from "../ui/format";
import { Rich } from "../ui/Rich";
import { Curve } from "./Curve";
import { changeLab, startExperiment, computing, firstAnswer, isMeasured, links, linkSeconds, isLabOn, partialTokens, PROMPT, runs, setLink, setLab, errorText } from "./experiment";
import { secondsOnLink, expectedRate } from "./theory";
import "./lab.css";

const START = "llamado serve -m smollm2 --lab 2 -ts 1,1,1";
const NO_LIMIT = 9; // right end of the slider: power of ten of bits per second

/** The latency lab: slow the links of a split model down and measure the effect. */
export function Lab() {
  const key = apiKey.value;
  const isSingleServer = isKnown.value && !isRouter.value;
  const isReady = health.value.state === "ready";
  useEffect(() => (isSingleServer ? watchCluster() : undefined), [key, isSingleServer]);
  useEffect(() => {
    if (!isSingleServer) return;
    getJson<LabBody>("lab").then(setLab, (error: Error) => (errorText.value = error.message));
    return startExperiment();
  }, [key, isSingleServer, isReady]);
  return (
    <div class="lab">
      <h1 class="hidden">{labels.value.lab.title}</h1>
      {isRouter.value && <RouterNotice view="lab" />}
      {errorText.value && <p class="notice">{errorText.value}</p>}
      {isLabOn.value === false && <ClosedLab />}
      {isLabOn.value && <OpenLab />}
    </div>
  );
}

function ClosedLab() {
  const t = labels.value.lab;
  return (
    <section class="start">
      <h2>{t.off}</h2>
      <p>
        <Rich text={t.offAbout} />
      </p>
      <pre>
        <code tabIndex={0}>{START}</code> <Copy text={START} />
      </pre>
    </section>
  );
}

function OpenLab() {
  const t = labels.value.lab;
  const { tokensPerSecond } = labels.value.common;
  const all = runs.value;
  const last = all.at(-1);
  const broken = all.filter((one) => !one.same).length;
  const link = linkSeconds();
  const expected = expectedRate(computing.value, link);
  return (
    <>
      <Figures label={t.now}>
        <Figure title={t.measured} value={last ? formatDecimal(last.rate, 1) : "–"} more={tokensPerSecond} />
        <Figure
          title={t.theory}
          value={expected === null ? "–" : formatDecimal(expected, 1)}
          more={expected !== null && !isMeasured.value ? t.predicted : tokensPerSecond}
        />
        <Figure title={t.linkTime} value={`${formatDecimal(1e3 * link, link < 0.01 ? 1 : 0)} ms`} more={t.perToken} />
        <div class={`figure badge ${broken ? "broken" : "whole"}`}>
          <dt>
            {broken ? t.badgeBroken(broken, all.length, partialTokens.value) : t.badge(all.length, partialTokens.value)}
          </dt>
          <dd>
            <strong role="status">{all.length === 0 ? "…" : broken ? t.differ : t.identical}</strong>
          </dd>
        </div>
      </Figures>
      <section>
        <h2>{t.speed}</h2>
        <Curve runs={all} computing={computing.value} link={link} />
        <p class="hint">{isMeasured.value ? t.curveHint : t.curveHintPredicted}</p>
      </section>
      <section>
        <h2>{t.links}</h2>
        <div class="links">
          {links.value.map((one) => (
            <LinkControls key={one.endpoint} link={one} />
          ))}
        </div>
      </section>
      <section>
        <h2>{t.answer}</h2>
        <p class="answer">
          <span>{PROMPT}</span>
          {firstAnswer.value ?? " …"}
        </p>
      </section>
    </>
  );
}

function LinkControls({ link }: { link: LabLink }) {
  const t = labels.value.lab;
  const device = cluster.value?.devices.find((one) => one.endpoint === link.endpoint);
  const name = device ? shortName(device.device) : link.worker;
  const runs = link.watched ? device?.state === "ready" || device?.state === "idle" : link.running;
  const set = (change: Partial<LabLink>) => setLink(link.endpoint, change);
  const power = link.bandwidth === null ? NO_LIMIT : Math.log10(link.bandwidth);
  return (
    <fieldset class={runs ? "" : "dead"}>
      <legend>
        {name} <small>{link.worker}</small>
      </legend>
      <Slider label={t.delay} value={link.latency_ms} most={100} shown={`${link.latency_ms} ms`} set={(n) => set({ latency_ms: n })} />
      <Slider label={t.jitter} value={link.jitter_ms} most={50} shown={`${link.jitter_ms} ms`} set={(n) => set({ jitter_ms: n })} />
      <Slider
        label={t.bandwidth}
        value={power}
        least={5}
        most={NO_LIMIT}
        step={0.25}
        shown={link.bandwidth === null ? t.noLimit : formatBits(link.bandwidth)}
        set={(n) => set({ bandwidth: n >= NO_LIMIT ? null : Math.round(10 ** n) })}
      />
      <p>
        <span class={`state ${device?.state ?? ""}`}>{!device ? t.notConnected : device.holds === null ? labels.value.cluster.states[device.state] : describeLayers(currentLayout.value, device.device)}</span>
        {device && <span class="share">{formatCost(secondsOnLink(link, [device]), device.predicted.runs)}</span>}
        {link.own &&
          (runs || link.watched ? (
            <button
              type="button"
              disabled={!runs}
              onClick={() => void changeLab("lab/kill", { endpoint: link.endpoint })}
            >
              {t.kill}
            </button>
          ) : (
            <button class="primary" type="button" onClick={() => void changeLab("lab/start", { endpoint: link.endpoint })}>
              {t.restart}
            </button>
          ))}
      </p>
    </fieldset>
  );
}

interface SliderProps {
  label: string;
  value: number;
  least?: number;
  most: number;
  step?: number;
  shown: string;
  set: (value: number) => void;
}

function Slider({ label, value, least = 0, most, step = 1, shown, set }: SliderProps) {
  return (
    <label class="slider">
      <span>{label}</span>
      <input
        type="range"
        min={least}
        max={most}
        step={step}
        value={value}
        aria-valuetext={shown}
        onInput={(event) => set(Number(event.currentTarget.value))}
      />
      <output>{shown}</output>
    </label>
  );
}

/** Return the time that a link adds to a token. */
function formatCost(seconds: number, turns: number): string {
  const ms = 1e3 * seconds;
  return labels.value.lab.cost(formatDecimal(ms, ms < 10 ? 1 : 0), turns);
}

function formatBits(n: number): string {
  return n >= 1e6 ? `${formatDecimal(n / 1e6, n < 1e7 ? 1 : 0)} Mbit/s` : `${Math.round(n / 1e3)} kbit/s`;
}
