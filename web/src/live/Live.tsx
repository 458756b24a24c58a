import { useSignal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { apiKey } from "../api/http";
import { Charts } from "./Charts";
import { follow, type Followed } from "./follow";
import { Lanes } from "./Lanes";
import "./live.css";
import { Log } from "./Log";
import { Models } from "./Models";
import type { Known } from "./state";
import { CacheTiles, Tiles } from "./Tiles";
import { Waterfall } from "./Waterfall";

const TICK_MS = 250;
const EVENTS = "live/events";

/** A stream that is followed while this component is shown; "": none. */
function useFollowed(path: string): Followed | null {
  const [followed, setFollowed] = useState<Followed | null>(null);
  const key = apiKey.value;
  useEffect(() => {
    if (!path) {
      setFollowed(null);
      return;
    }
    const mine = follow(path);
    setFollowed(mine);
    return mine.stop;
  }, [path, key]);
  return followed;
}

/** The server's time, in seconds, while something runs that grows with it. */
function useNow(known: Known): number {
  const now = useSignal(0);
  const ahead = known.ahead;
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

function Trouble({ followed }: { followed: Followed }) {
  return followed.trouble.value ? <p class="notice">{followed.trouble.value}</p> : null;
}

function Engine({ known }: { known: Known }) {
  const now = useNow(known);
  return (
    <>
      {known.asleep && <p class="asleep">The model is asleep: it is loaded again by the next request.</p>}
      <Tiles known={known} />
      <Lanes known={known} />
      <Waterfall known={known} now={now} />
      <Charts samples={known.samples} />
      <CacheTiles known={known} />
    </>
  );
}

/** One model of a router, seen through it. */
function OfModel({ id }: { id: string }) {
  const followed = useFollowed(`${EVENTS}?model=${encodeURIComponent(id)}`);
  const known = followed?.known.value;
  return (
    <div class="of-model">
      <h2>{id}</h2>
      {followed && <Trouble followed={followed} />}
      {known?.slots && <Engine known={known} />}
    </div>
  );
}

function OfRouter({ known }: { known: Known }) {
  const wanted = useSignal("");
  const models = known.models ?? [];
  const loaded = models.filter((one) => one.state === "loaded");
  const chosen = (loaded.find((one) => one.id === wanted.value) ?? loaded[0])?.id ?? "";
  return (
    <>
      <Models models={models} chosen={chosen} onChoose={(id) => (wanted.value = id)} />
      {chosen ? <OfModel key={chosen} id={chosen} /> : <p class="nothing">Slots and requests are shown of a model that is loaded.</p>}
      <Log lines={known.log} models={models.map((one) => one.id)} />
    </>
  );
}

export function Live() {
  const followed = useFollowed(EVENTS);
  const known = followed?.known.value;
  return (
    <div class="live">
      <h1 class="hidden">Live</h1>
      {followed && <Trouble followed={followed} />}
      {!known && !followed?.trouble.value && <p class="nothing">Asking the server…</p>}
      {known?.models && <OfRouter known={known} />}
      {known?.slots && (
        <>
          <Engine known={known} />
          <Log lines={known.log} />
        </>
      )}
    </div>
  );
}
