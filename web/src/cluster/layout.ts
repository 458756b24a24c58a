// Layouts: a list with the device of each layer, and of the head at the end.
import type { LayoutPart } from "../api/schema";
import { labels } from "../text";

export type Layout = string[];

/** Return the layout of devices; a layer on no device is "". */
export function layoutOf(devices: LayoutPart[]): Layout {
  const n = Math.max(-1, ...devices.flatMap((one) => one.layers)) + 1;
  const found: Layout = Array<string>(n + 1).fill("");
  for (const one of devices) {
    for (const layer of one.layers) found[layer] = one.device;
    if (one.head) found[n] = one.device;
  }
  return found;
}

/** Return the parts of a layout, for a request. */
export function partsOf(layout: Layout): LayoutPart[] {
  const head = layout.length - 1;
  return [...new Set(layout)].map((device) => ({
    device,
    layers: layout.flatMap((one, i) => (one === device && i < head ? [i] : [])),
    head: layout[head] === device,
  }));
}

export function isSameLayout(a: Layout, b: Layout): boolean {
  return a.length === b.length && a.every((one, i) => one === b[i]);
}

/** Return the layout with all places between two, both included, on a device. */
export function assignPlaces(layout: Layout, from: number, to: number, device: string): Layout {
  const [first, last] = from < to ? [from, to] : [to, from];
  return layout.map((one, i) => (i >= first && i <= last ? device : one));
}

export type Edge = "start" | "end";

/** Return the place next to one edge of a device's layers, which the device would take; null if there is none. */
export function placeToTake(layout: Layout, device: string, edge: Edge): number | null {
  const first = layout.indexOf(device);
  if (first < 0) return edge === "end" && layout.length > 1 ? layout.length - 2 : null;
  const place = edge === "start" ? first - 1 : layout.lastIndexOf(device) + 1;
  return place >= 0 && place < layout.length ? place : null;
}

/** Return the place at one edge of a device's layers, and the neighbor that would take it; null if there is no neighbor. */
export function placeToGive(layout: Layout, device: string, edge: Edge): { place: number; to: string } | null {
  const place = edge === "start" ? layout.indexOf(device) : layout.lastIndexOf(device);
  if (place < 0) return null;
  const to = layout[edge === "start" ? place - 1 : place + 1];
  return to === undefined ? null : { place, to };
}

/** Return the name of a place. */
export function placeName(layout: Layout, place: number): string {
  return place === layout.length - 1 ? labels.value.cluster.head : labels.value.cluster.layer(place);
}

/** Return the layers of a device in words. */
export function describeLayers(layout: Layout, device: string): string {
  const t = labels.value.cluster;
  const head = layout.length - 1;
  const runs: string[] = [];
  for (let i = 0; i < head; i++) {
    if (layout[i] !== device) continue;
    const first = i;
    while (i + 1 < head && layout[i + 1] === device) i++;
    runs.push(first === i ? t.layer(i) : t.layerRange(first, i));
  }
  if (layout[head] === device) runs.push(t.head);
  return runs.join(t.and) || t.noLayers;
}

/** Return a device's name without its address. */
export function shortName(device: string): string {
  return device.replace(/\[.*\]$/, "");
}
