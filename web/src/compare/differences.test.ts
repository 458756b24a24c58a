import { expect, test } from "vitest";
import { differing, words } from "./differences";

function said(one: string, other: string): [string[], string[]] {
  const [a, b] = [one, other].map((text) => words(text).map((word) => word.text)) as [string[], string[]];
  const [left, right] = differing(a, b);
  return [left.map((at) => a[at]!), right.map((at) => b[at]!)];
}

test("words that the other text has not", () => {
  expect(said("the red fox runs", "the quick fox runs far")).toEqual([["red"], ["quick", "far"]]);
  expect(said("same here", "same here")).toEqual([[], []]);
  expect(said("", "all new")).toEqual([[], ["all", "new"]]);
  expect(said("a b c d", "b d a")).toEqual([["a", "c"], ["a"]]);
});

test("words of any script, and where they begin", () => {
  expect(words("Año 7, 好的!")).toEqual([
    { text: "Año", start: 0 },
    { text: "7", start: 4 },
    { text: ",", start: 5 },
    { text: "好的", start: 7 },
    { text: "!", start: 9 },
  ]);
});

test("long texts that share nothing in their middle take no time", () => {
  const a = Array.from({ length: 50_000 }, (_, index) => `a${index}`);
  const b = Array.from({ length: 50_000 }, (_, index) => `b${index}`);
  const began = performance.now();
  const [left, right] = differing(["x", ...a, "y"], ["x", ...b, "y"]);
  expect([left.length, right.length, left[0], right.at(-1)]).toEqual([50_000, 50_000, 1, 50_000]);
  expect(performance.now() - began).toBeLessThan(1000);
});
