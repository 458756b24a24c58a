// Theory of link times: a token waits once for the link at each turn of a worker, and for its bytes to be sent.
import type { DeviceView, LabLink, LayoutPrediction } from "../api/schema";

/** Return the seconds of a token on a link. A tap delays messages to a worker; the mean jitter is half of its maximum. */
export function secondsOnLink(link: LabLink, devices: DeviceView[]): number {
  let seconds = 0;
  for (const device of devices.filter((one) => one.endpoint === link.endpoint)) {
    const turn = (link.latency_ms + link.jitter_ms / 2) / 1e3;
    seconds += device.predicted.runs * turn;
    if (link.bandwidth !== null) seconds += (8 * device.predicted.bytes) / link.bandwidth;
  }
  return seconds;
}

/** Return the seconds of a token on all links. */
export function secondsOnLinks(links: LabLink[], devices: DeviceView[]): number {
  return links.reduce((seconds, link) => seconds + secondsOnLink(link, devices), 0);
}

/** Return the predicted seconds of a token without links; null if a speed is unknown. */
export function predictedComputing(prediction: LayoutPrediction): number | null {
  let seconds = 0;
  for (const { seconds: its } of prediction.devices) {
    if (its.compute === null) return null;
    seconds += its.compute;
  }
  return seconds || null;
}

/** Return tokens per second by the formula; null if the compute time is unknown. */
export function expectedRate(computing: number | null, link: number): number | null {
  return computing === null ? null : 1 / (computing + link);
}
