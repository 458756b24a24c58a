import { useRef, useState } from "preact/hooks";
import { ms, shortName } from "./figures";
import { type Edge, type Layout, paint, placeName, placeToGive, placeToTake } from "./layout";
import type { DeviceView } from "./schema";
import { busy, cluster, draft, now, prediction, tryOut } from "./state";

interface Grip {
  place: number;
  layout: Layout;
}

/** A lane for each device, a column for each layer and the head: layers are dragged from lane to lane. */
export function Lanes({ devices }: { devices: DeviceView[] }) {
  const shown = draft.value ?? now.value;
  const rows = useRef<(HTMLDivElement | null)[]>([]);
  const [grip, setGrip] = useState<Grip | null>(null);
  const [preview, setPreview] = useState<Layout | null>(null);
  const still = busy.value === "moving";

  function placeAt(x: number): number {
    const { left, width } = rows.current[0]!.getBoundingClientRect();
    return Math.min(shown.length - 1, Math.max(0, Math.floor(((x - left) / width) * shown.length)));
  }

  function laneAt(y: number): number {
    const boxes = rows.current.slice(0, devices.length).map((row) => row!.getBoundingClientRect());
    const distances = boxes.map((box) => Math.abs(y - (box.top + box.bottom) / 2));
    return distances.indexOf(Math.min(...distances));
  }

  function down(event: PointerEvent) {
    if (event.button !== 0 || still) return;
    (event.currentTarget as HTMLElement).setPointerCapture(event.pointerId);
    setGrip({ place: placeAt(event.clientX), layout: shown });
    move(event, { place: placeAt(event.clientX), layout: shown });
  }

  function move(event: PointerEvent, held = grip) {
    if (held) setPreview(paint(held.layout, held.place, placeAt(event.clientX), devices[laneAt(event.clientY)]!.device));
  }

  function up() {
    if (preview) void tryOut(preview);
    setGrip(null);
    setPreview(null);
  }

  const painted = preview ?? shown;
  const longest = Math.max(...devices.map((one) => Math.max(taken(one), one.predicted.seconds ?? 0)), 1e-9);
  return (
    <div class={`lanes ${grip ? "gripped" : ""}`}>
      {devices.map((device, i) => (
        <section key={device.device} class={`lane ${device.state}`} aria-label={device.device} style={{ "--own": `var(--device-${i % 6})` }}>
          <h3 title={device.device}>
            {shortName(device.device)} <small>{device.state === "ready" ? "" : device.state}</small>
          </h3>
          <Edges layout={shown} device={device.device} edge="start" still={still} />
          <div
            class="places"
            role="img"
            aria-label={described(shown, device.device)}
            ref={(row) => {
              rows.current[i] = row;
            }}
            onPointerDown={down}
            onPointerMove={move}
            onPointerUp={up}
            onPointerCancel={() => (setGrip(null), setPreview(null))}
          >
            {painted.map((one, place) => (
              <i
                key={place}
                class={`${one === device.device ? "has" : ""} ${place === painted.length - 1 ? "head" : ""} ${one === device.device && now.value[place] !== one ? "new" : ""}`}
                title={placeName(painted, place)}
              />
            ))}
          </div>
          <Edges layout={shown} device={device.device} edge="end" still={still} />
          <Times device={device} longest={longest} />
        </section>
      ))}
    </div>
  );
}

/** Seconds of a token that a device took for what it has, without those behind other batches. */
function taken(device: DeviceView): number {
  // While no token was made, what a device did was reading a prompt, or making ready for it.
  if (!cluster.value?.token_seconds?.total) return 0;
  if (!device.layers.length && !device.head) return 0;
  return device.token_seconds.compute + device.token_seconds.link;
}

function described(layout: Layout, device: string): string {
  const head = layout.length - 1;
  const runs: string[] = [];
  for (let i = 0; i < head; i++) {
    if (layout[i] !== device) continue;
    const first = i;
    while (i + 1 < head && layout[i + 1] === device) i++;
    runs.push(first === i ? `layer ${i}` : `layers ${first} to ${i}`);
  }
  if (layout[head] === device) runs.push("the head");
  return runs.join(" and ") || "nothing";
}

/** Buttons that move the border of what a device has, for those who do not drag. */
function Edges({ layout, device, edge, still }: { layout: Layout; device: string; edge: Edge; still: boolean }) {
  const take = placeToTake(layout, device, edge);
  const give = placeToGive(layout, device, edge);
  const name = shortName(device);
  return (
    <span class="edges">
      <button
        type="button"
        class="quiet"
        disabled={still || take === null}
        aria-label={take === null ? `${name}: nothing to take at the ${edge}` : `${name} takes ${placeName(layout, take)}`}
        title={take === null ? undefined : `${name} takes ${placeName(layout, take)}`}
        onClick={() => take !== null && void tryOut(paint(layout, take, take, device))}
      >
        +
      </button>
      <button
        type="button"
        class="quiet"
        disabled={still || give === null}
        aria-label={give === null ? `${name}: nothing to give at the ${edge}` : `${name} gives ${placeName(layout, give.place)} to ${shortName(give.to)}`}
        title={give === null ? undefined : `${name} gives ${placeName(layout, give.place)} to ${shortName(give.to)}`}
        onClick={() => give && void tryOut(paint(layout, give.place, give.place, give.to))}
      >
        −
      </button>
    </span>
  );
}

/** What a device should take for a token, and takes. */
function Times({ device, longest }: { device: DeviceView; longest: number }) {
  const after = prediction.value?.devices.find((one) => one.device === device.device)?.seconds;
  const then = after && after.compute !== null ? after.compute + after.link : null;
  const measured = taken(device);
  const bar = (seconds: number | null, name: string) => (
    <b class={name} style={{ width: `${Math.min(100, (100 * (seconds ?? 0)) / longest)}%` }} />
  );
  return (
    <div class="times">
      <span class="bars" aria-hidden="true">
        {bar(device.predicted.seconds, "predicted")}
        {bar(measured, "measured")}
      </span>
      <span class="words">
        <span title="predicted, for a token">{ms(device.predicted.seconds)}</span>
        {draft.value && <strong title="with the layout that is tried out"> → {ms(then)}</strong>}
        <br />
        <span title="measured over the last minute, for a token">{measured ? ms(measured) : "–"}</span>
      </span>
    </div>
  );
}
