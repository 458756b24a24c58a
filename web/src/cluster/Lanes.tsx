import { useRef, useState } from "preact/hooks";
import { labels } from "../text";
import { formatMs } from "../ui/format";
import { type Edge, type Layout, assignPlaces, describeLayers, placeName, placeToGive, placeToTake, shortName } from "./layout";
import type { DeviceView } from "../api/schema";
import { busy, cluster, draftLayout, currentLayout, prediction, previewLayout } from "./state";

interface Drag {
  place: number;
  layout: Layout;
}

/** A lane for each device, a column for each layer and the head. Layers can be dragged between lanes. */
export function Lanes({ devices }: { devices: DeviceView[] }) {
  const shown = draftLayout.value ?? currentLayout.value;
  const rows = useRef<(HTMLDivElement | null)[]>([]);
  const [drag, setDrag] = useState<Drag | null>(null);
  const [preview, setPreview] = useState<Layout | null>(null);
  const isLocked = busy.value === "moving";

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
    if (event.button !== 0 || isLocked) return;
    (event.currentTarget as HTMLElement).setPointerCapture(event.pointerId);
    setDrag({ place: placeAt(event.clientX), layout: shown });
    move(event, { place: placeAt(event.clientX), layout: shown });
  }

  function move(event: PointerEvent, origin = drag) {
    if (origin) setPreview(assignPlaces(origin.layout, origin.place, placeAt(event.clientX), devices[laneAt(event.clientY)]!.device));
  }

  function up() {
    if (preview) void previewLayout(preview);
    setDrag(null);
    setPreview(null);
  }

  const painted = preview ?? shown;
  const longest = Math.max(...devices.map((one) => Math.max(measuredSeconds(one), one.predicted.seconds ?? 0)), 1e-9);
  return (
    <div class={`lanes ${drag ? "dragging" : ""}`}>
      {devices.map((device, i) => (
        <section key={device.device} class={`lane ${device.state}`} aria-label={device.device} style={{ "--own": `var(--device-${i % 6})` }}>
          <h3 title={device.device}>
            {shortName(device.device)} <small>{labels.value.cluster.laneStates[device.state]}</small>
          </h3>
          <EdgeButtons layout={shown} device={device.device} edge="start" isLocked={isLocked} />
          <div
            class="places"
            role="img"
            aria-label={describeLayers(shown, device.device)}
            ref={(row) => {
              rows.current[i] = row;
            }}
            onPointerDown={down}
            onPointerMove={move}
            onPointerUp={up}
            onPointerCancel={() => (setDrag(null), setPreview(null))}
          >
            {painted.map((one, place) => (
              <i
                key={place}
                class={`${one === device.device ? "has" : ""} ${place === painted.length - 1 ? "head" : ""} ${one === device.device && currentLayout.value[place] !== one ? "new" : ""}`}
                title={placeName(painted, place)}
              />
            ))}
          </div>
          <EdgeButtons layout={shown} device={device.device} edge="end" isLocked={isLocked} />
          <Times device={device} longest={longest} />
        </section>
      ))}
    </div>
  );
}

/** Return the measured seconds of a token on a device, without waiting behind other batches. */
function measuredSeconds(device: DeviceView): number {
  // Without generated tokens, the times are those of prompts and of warming up.
  if (!cluster.value?.token_seconds?.total) return 0;
  if (!device.layers.length && !device.head) return 0;
  return device.token_seconds.compute + device.token_seconds.link;
}

/** Buttons that move the border of a device's layers, as an alternative to dragging. */
function EdgeButtons({ layout, device, edge, isLocked }: { layout: Layout; device: string; edge: Edge; isLocked: boolean }) {
  const t = labels.value.cluster;
  const take = placeToTake(layout, device, edge);
  const give = placeToGive(layout, device, edge);
  const name = shortName(device);
  const taking = take !== null && t.moveTo(placeName(layout, take), name);
  const giving = give && t.moveFrom(placeName(layout, give.place), name, shortName(give.to));
  return (
    <span class="edges">
      <button
        type="button"
        class="quiet"
        disabled={isLocked || take === null}
        aria-label={taking || t.noLayerTo[edge](name)}
        title={taking || undefined}
        onClick={() => take !== null && void previewLayout(assignPlaces(layout, take, take, device))}
      >
        +
      </button>
      <button
        type="button"
        class="quiet"
        disabled={isLocked || give === null}
        aria-label={giving || t.noLayerFrom[edge](name)}
        title={giving || undefined}
        onClick={() => give && void previewLayout(assignPlaces(layout, give.place, give.place, give.to))}
      >
        −
      </button>
    </span>
  );
}

/** Predicted and measured seconds of a token on a device. */
function Times({ device, longest }: { device: DeviceView; longest: number }) {
  const t = labels.value.cluster;
  const after = prediction.value?.devices.find((one) => one.device === device.device)?.seconds;
  const then = after && after.compute !== null ? after.compute + after.link : null;
  const measured = measuredSeconds(device);
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
        <span title={t.predictedTitle}>{formatMs(device.predicted.seconds)}</span>
        {draftLayout.value && <strong title={t.draftedTitle}> → {formatMs(then)}</strong>}
        <br />
        <span title={t.measuredTitle}>{measured ? formatMs(measured) : "–"}</span>
      </span>
    </div>
  );
}
