import { expect, it } from "vitest";
import { formatBytes, formatMs, formatLength, formatRate, formatSeconds } from "./format";

it("formats values with about three digits", () => {
  expect([0, 1023, 1536, 190 << 20, 21.4 * 2 ** 30].map(formatBytes)).toEqual(["0 B", "1023 B", "1.5 KiB", "190 MiB", "21.4 GiB"]);
  expect([0, 1.234, 12.34, 123.4, 12_340].map(formatRate)).toEqual(["0", "1.23", "12.3", "123", "12.3k"]);
  expect([0.0123, 1.234, 12.34, 83].map(formatSeconds)).toEqual(["12 ms", "1.23 s", "12.3 s", "1 min 23 s"]);
  expect([0.9, 65, 600].map(formatLength)).toEqual(["0:00", "1:05", "10:00"]);
  expect([null, 0.001234, 0.01234, 0.1234].map(formatMs)).toEqual(["–", "1.23 ms", "12.3 ms", "123 ms"]);
});
