import { useSignal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { apiKey } from "../api/http";
import { labels } from "../text";
import { Charts } from "./Charts";
import { openStream, type LiveStream } from "./stream";
import { Lanes } from "./Lanes";
import "./live.css";
import { Log } from "./Log";
import { Models } from "./Models";
import type { LiveState } from "./state";
import { CacheTiles, Tiles } from "./Tiles";
import { Waterfall } from "./Waterfall";

const TICK_MS = 250;
const EVENTS = "live/events";

/** Return a stream that is open while this component is mounted; null without a path. */
function useLiveStream(path: string): LiveStream | null {
  const [stream, setStream] = useState<LiveStream | null>(null);
  const key = apiKey.value;
  useEffect(() => {
    if (!path) {
      setStream(null);
      return;
    }
    const mine = openStream(path);
    setStream(mine);
    return mine.stop;
  }, [path, key]);
  return stream;
}

/** Return the server's time in seconds, updated four times a second. */
function useNow(live: LiveState): number {
  const now = useSignal(0);
  const ahead = live.ahead;
  useEffect(() => {
    const tick = () => {
      if (!document.hidden) now.value = Date.now() / 1000 + ahead;
    };
    tick();
    const timer = setInterval(tick, TICK_MS);
    return () => clearInterval(timer);
  }, [Math.round(ahead)]);
  return now.value || Date.now() / 1000 + ahead;
}

function StreamError({ stream }: { stream: LiveStream }) {
  return stream.errorText.value ? <p class="notice">{stream.errorText.value}</p> : null;
}

function EngineView({ live }: { live: LiveState }) {
  const now = useNow(live);
  return (
    <>
      {live.asleep && <p class="asleep">{labels.value.live.asleep}</p>}
      <Tiles live={live} />
      <Lanes live={live} />
      <Waterfall live={live} now={now} />
      <Charts samples={live.samples} />
      <CacheTiles live={live} />
    </>
  );
}

/** Live view of one model of a router. */
function ModelView({ id }: { id: string }) {
  const stream = useLiveStream(`${EVENTS}?model=${encodeURIComponent(id)}`);
  const live = stream?.state.value;
  return (
    <div class="of-model">
      <h2>{id}</h2>
      {stream && <StreamError stream={stream} />}
      {live?.slots && <EngineView live={live} />}
    </div>
  );
}

function RouterView({ live }: { live: LiveState }) {
  const selected = useSignal("");
  const models = live.models ?? [];
  const loaded = models.filter((one) => one.state === "loaded");
  const chosen = (loaded.find((one) => one.id === selected.value) ?? loaded[0])?.id ?? "";
  return (
    <>
      <Models models={models} chosen={chosen} onChoose={(id) => (selected.value = id)} />
      {chosen ? <ModelView key={chosen} id={chosen} /> : <p class="nothing">{labels.value.live.loadToSee}</p>}
      <Log lines={live.log} models={models.map((one) => one.id)} />
    </>
  );
}

export function Live() {
  const stream = useLiveStream(EVENTS);
  const live = stream?.state.value;
  return (
    <div class="live">
      <h1 class="hidden">{labels.value.live.title}</h1>
      {stream && <StreamError stream={stream} />}
      {!live && !stream?.errorText.value && <p class="nothing">{labels.value.common.loading}</p>}
      {live?.models && <RouterView live={live} />}
      {live?.slots && (
        <>
          <EngineView live={live} />
          <Log lines={live.log} />
        </>
      )}
    </div>
  );
}
