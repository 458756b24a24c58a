import { useEffect } from "preact/hooks";
import { apiKey, getJson } from "../api/http";
import { health, isKnown, isRouter } from "../api/server";
import { BehindRouter } from "../cluster/BehindRouter";
import { shortName } from "../cluster/figures";
import { cluster, watch } from "../cluster/state";
import { Copy } from "../ui/Copy";
import { Figure, Figures } from "../ui/Figures";
import { Curve } from "./Curve";
import { act, begin, computing, first, isMeasured, links, linkSeconds, on, partial, PROMPT, runs, setLink, take, trouble } from "./runs";
import type { LabLink } from "./theory";
import { secondsOnLink, theory } from "./theory";
import "./lab.css";

const START = "llamado serve -m smollm2 --lab 2 -ts 1,1,1";
const NO_LIMIT = 9; // the slider's right end, as a power of ten of bits per second

/** What slow links do to a model that is divided: links are made slower, and what comes of it is measured. */
export function Lab() {
  const key = apiKey.value;
  const asked = isKnown.value && !isRouter.value;
  const isReady = health.value.state === "ready";
  useEffect(() => (asked ? watch() : undefined), [key, asked]);
  useEffect(() => {
    if (!asked) return;
    getJson<Parameters<typeof take>[0]>("lab").then(take, (error: Error) => (trouble.value = error.message));
    return begin();
  }, [key, asked, isReady]);
  return (
    <div class="lab">
      <h1 class="hidden">Latency lab</h1>
      {isRouter.value && <BehindRouter what="lab" />}
      {trouble.value && <p class="notice">{trouble.value}</p>}
      {on.value === false && <Off />}
      {on.value && <On />}
    </div>
  );
}

function Off() {
  return (
    <section class="start">
      <h2>The lab is closed</h2>
      <p>
        A server that is started with <code>--lab</code> puts a tap before each of its workers. Here their delay, jitter and bandwidth can then be
        set, workers be killed, and tokens a second be seen beside what theory says. For example:
      </p>
      <pre>
        <code>{START}</code> <Copy text={START} />
      </pre>
    </section>
  );
}

function On() {
  const all = runs.value;
  const last = all.at(-1);
  const broken = all.filter((one) => !one.same).length;
  const link = linkSeconds();
  const expected = theory(computing.value, link);
  return (
    <>
      <Figures label="Now">
        <Figure title="Measured" value={last ? last.rate.toFixed(1) : "–"} more="tokens/s" />
        <Figure
          title="In theory"
          value={expected === null ? "–" : expected.toFixed(1)}
          more={`tokens/s${expected !== null && !isMeasured.value ? ", reckoned" : ""}`}
        />
        <Figure title="On links" value={`${(1e3 * link).toFixed(link < 0.01 ? 1 : 0)} ms`} more="a token" />
        <div class={`figure badge ${broken ? "broken" : "whole"}`}>
          <dt>
            {broken ? `${broken} of ${all.length} answers` : `${all.length} answers`}, {partial.value} tokens of the next
          </dt>
          <dd>
            <strong role="status">{all.length === 0 ? "…" : broken ? "Bytes differ" : "Bytes are equal"}</strong>
          </dd>
        </div>
      </Figures>
      <section>
        <h2>Tokens a second by delay</h2>
        <Curve runs={all} computing={computing.value} link={link} />
        <p class="hint">
          The line is 1 / (computing + delays of all links that a token passes); the ring is where the sliders stand. Computing is what the
          fastest run without delays took{isMeasured.value ? "" : "; until there is one, the server's arithmetic says it: set all sliders to the left once"}.
        </p>
      </section>
      <section>
        <h2>Links</h2>
        <div class="links">
          {links.value.map((one) => (
            <Link key={one.endpoint} link={one} />
          ))}
        </div>
      </section>
      <section>
        <h2>The answer</h2>
        <p class="answer">
          <span>{PROMPT}</span>
          {first.value ?? " …"}
        </p>
      </section>
    </>
  );
}

function Link({ link }: { link: LabLink }) {
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
      <Slider name="Delay" value={link.latency_ms} most={100} shown={`${link.latency_ms} ms`} set={(n) => set({ latency_ms: n })} />
      <Slider name="Jitter" value={link.jitter_ms} most={50} shown={`${link.jitter_ms} ms`} set={(n) => set({ jitter_ms: n })} />
      <Slider
        name="Bandwidth"
        value={power}
        least={5}
        most={NO_LIMIT}
        step={0.25}
        shown={link.bandwidth === null ? "no limit" : bits(link.bandwidth)}
        set={(n) => set({ bandwidth: n >= NO_LIMIT ? null : Math.round(10 ** n) })}
      />
      <p>
        <span class={`state ${device?.state ?? ""}`}>{device ? (device.holds ?? device.state) : "not there"}</span>
        {device && <span class="share">{cost(secondsOnLink(link, [device]), device.predicted.runs)}</span>}
        {link.own &&
          (runs || link.watched ? (
            <button
              type="button"
              disabled={!runs}
              onClick={() => void act("lab/kill", { endpoint: link.endpoint })}
            >
              Kill this worker
            </button>
          ) : (
            <button class="primary" type="button" onClick={() => void act("lab/start", { endpoint: link.endpoint })}>
              Start it again
            </button>
          ))}
      </p>
    </fieldset>
  );
}

interface SliderProps {
  name: string;
  value: number;
  least?: number;
  most: number;
  step?: number;
  shown: string;
  set: (value: number) => void;
}

function Slider({ name, value, least = 0, most, step = 1, shown, set }: SliderProps) {
  return (
    <label class="slider">
      <span>{name}</span>
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

/** What a link adds to a token. */
function cost(seconds: number, turns: number): string {
  const ms = 1e3 * seconds;
  return `+ ${ms.toFixed(ms < 10 ? 1 : 0)} ms a token${turns > 1 ? `, in ${turns} turns` : ""}`;
}

function bits(n: number): string {
  return n >= 1e6 ? `${(n / 1e6).toFixed(n < 1e7 ? 1 : 0)} Mbit/s` : `${Math.round(n / 1e3)} kbit/s`;
}
