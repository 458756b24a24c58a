import { expect, it } from "vitest";
import type { DeviceView, LabLink } from "../api/schema";
import { secondsOnLinks, predictedComputing, expectedRate } from "./theory";

const link = (endpoint: string, latency_ms: number, jitter_ms = 0, bandwidth: number | null = null): LabLink => ({
  endpoint, latency_ms, jitter_ms, bandwidth, worker: "w", own: true, running: true, watched: false,
});
const device = (endpoint: string, runs: number, bytes: number) => ({ endpoint, predicted: { seconds: 0, bytes, runs } }) as DeviceView;

it("adds a delay per turn, half of the jitter, and bytes over bandwidth", () => {
  const devices = [device("a", 1, 1000), device("b", 2, 500), device("c", 0, 0)];
  expect(secondsOnLinks([link("a", 20), link("b", 10, 4), link("c", 99)], devices)).toBeCloseTo(0.02 + 2 * 0.012);
  expect(secondsOnLinks([link("a", 0, 0, 80_000)], devices)).toBeCloseTo(0.1);
  expect(expectedRate(0.01, 0.04)).toBeCloseTo(20);
  expect(expectedRate(null, 0.04)).toBeNull();
});

it("sums the predicted compute times, and returns null if a speed is unknown", () => {
  const memory = { weights: 0, kv: 0, compute: 0, free: 0, missing: 0 };
  const part = (compute: number | null) => ({ device: "d", memory, seconds: { compute, link: 7 } });
  expect(predictedComputing({ seconds: 9, devices: [part(0.01), part(0.02)] })).toBeCloseTo(0.03);
  expect(predictedComputing({ seconds: null, devices: [part(0.01), part(null)] })).toBeNull();
});
