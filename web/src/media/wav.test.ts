import { expect, test } from "vitest";
import { encodeWav, mixToMono } from "./wav";

test("writes 16-bit samples behind a header of 44 bytes", async () => {
  const blob = encodeWav(Float32Array.from([0, 1, -1, 0.5, 2, -2]), 16_000);
  expect([blob.type, blob.size]).toEqual(["audio/wav", 44 + 12]);
  const view = new DataView(await blob.arrayBuffer());
  const text = (at: number) => String.fromCharCode(...new Uint8Array(view.buffer, at, 4));
  expect([text(0), text(8), text(12), text(36)]).toEqual(["RIFF", "WAVE", "fmt ", "data"]);
  expect([view.getUint32(4, true), view.getUint32(40, true)]).toEqual([48, 12]);
  expect([view.getUint16(22, true), view.getUint32(24, true), view.getUint32(28, true)]).toEqual([1, 16_000, 32_000]);
  const samples = Array.from({ length: 6 }, (_, i) => view.getInt16(44 + 2 * i, true));
  expect(samples).toEqual([0, 32767, -32767, 16384, 32767, -32768]);
});

test("mixes channels to their mean", () => {
  expect([...mixToMono([Float32Array.from([1, 0]), Float32Array.from([0, -0.5])])]).toEqual([0.5, -0.25]);
  expect([...mixToMono([Float32Array.from([0.5])])]).toEqual([0.5]);
  expect(mixToMono([]).length).toBe(0);
});
