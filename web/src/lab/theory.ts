// What links cost a token: each turn of a worker waits once for its link, and bytes take their time.
import type { DeviceView, LayoutPrediction } from "../cluster/schema";

export interface LabLink {
  endpoint: string;
  worker: string;
  latency_ms: number;
  jitter_ms: number;
  /** Bits per second; null: no limit. */
  bandwidth: number | null;
  own: boolean;
  running: boolean;
  /** Whether `llamado up` started the worker, and starts it again by itself. */
  watched: boolean;
}

/** Seconds of a token on a link. A tap delays what goes to a worker, and jitter is half of its most on average. */
export function secondsOnLink(link: LabLink, devices: DeviceView[]): number {
  let seconds = 0;
  for (const device of devices.filter((one) => one.endpoint === link.endpoint)) {
    const turn = (link.latency_ms + link.jitter_ms / 2) / 1e3;
    seconds += device.predicted.runs * turn;
    if (link.bandwidth !== null) seconds += (8 * device.predicted.bytes) / link.bandwidth;
  }
  return seconds;
}

/** Seconds of a token on all links. */
export function secondsOnLinks(links: LabLink[], devices: DeviceView[]): number {
  return links.reduce((seconds, link) => seconds + secondsOnLink(link, devices), 0);
}

/** Seconds of a token without its links, as the server reckons; null: a speed is not known. */
export function secondsReckoned(told: LayoutPrediction): number | null {
  let seconds = 0;
  for (const { seconds: its } of told.devices) {
    if (its.compute === null) return null;
    seconds += its.compute;
  }
  return seconds || null;
}

/** Tokens per second; null while nobody knows how long computing takes. */
export function theory(computing: number | null, link: number): number | null {
  return computing === null ? null : 1 / (computing + link);
}
