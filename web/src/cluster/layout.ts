// Who has which layers, as a list with a device's name for each layer and for the head behind the last one.
import type { DeviceView, LayoutPart } from "./schema";

export type Layout = string[];

/** The layout of devices that have every layer; a place that nobody has is "". */
export function layoutOf(devices: LayoutPart[]): Layout {
  const n = Math.max(-1, ...devices.flatMap((one) => one.layers)) + 1;
  const found: Layout = Array<string>(n + 1).fill("");
  for (const one of devices) {
    for (const layer of one.layers) found[layer] = one.device;
    if (one.head) found[n] = one.device;
  }
  return found;
}

/** The parts of a layout, for the server. */
export function partsOf(layout: Layout): LayoutPart[] {
  const head = layout.length - 1;
  return [...new Set(layout)].map((device) => ({
    device,
    layers: layout.flatMap((one, i) => (one === device && i < head ? [i] : [])),
    head: layout[head] === device,
  }));
}

export function same(a: Layout, b: Layout): boolean {
  return a.length === b.length && a.every((one, i) => one === b[i]);
}

/** The layout with the places between two (both included) on a device. */
export function paint(layout: Layout, from: number, to: number, device: string): Layout {
  const [first, last] = from < to ? [from, to] : [to, from];
  return layout.map((one, i) => (i >= first && i <= last ? device : one));
}

export type Edge = "start" | "end";

/** The place that a device would take with one more at an edge of what it has; null where there is none. */
export function placeToTake(layout: Layout, device: string, edge: Edge): number | null {
  const first = layout.indexOf(device);
  if (first < 0) return edge === "end" && layout.length > 1 ? layout.length - 2 : null;
  const place = edge === "start" ? first - 1 : layout.lastIndexOf(device) + 1;
  return place >= 0 && place < layout.length ? place : null;
}

/** The place that a device would give to its neighbour at an edge, and who that is; null where there is no neighbour. */
export function placeToGive(layout: Layout, device: string, edge: Edge): { place: number; to: string } | null {
  const place = edge === "start" ? layout.indexOf(device) : layout.lastIndexOf(device);
  if (place < 0) return null;
  const to = layout[edge === "start" ? place - 1 : place + 1];
  return to === undefined ? null : { place, to };
}

/** A place in words. */
export function placeName(layout: Layout, place: number): string {
  return place === layout.length - 1 ? "the head" : `layer ${place}`;
}

/** The devices between which a token goes, in order: whose turn it is, from the first layer to the head. */
export function turns(layout: Layout): string[] {
  return layout.filter((one, i) => i === 0 || one !== layout[i - 1]);
}

/** Devices in the order of the server's list, by their names. */
export function byName(devices: DeviceView[]): Map<string, DeviceView> {
  return new Map(devices.map((one) => [one.device, one]));
}
