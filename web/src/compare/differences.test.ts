import { expect, test } from "vitest";
import { differingWords, words } from "./differences";

function differences(one: string, other: string): [string[], string[]] {
  const [a, b] = [one, other].map((text) => words(text).map((word) => word.text)) as [string[], string[]];
  const [left, right] = differingWords(a, b);
  return [left.map((at) => a[at]!), right.map((at) => b[at]!)];
}

test("finds the words that differ", () => {
  expect(differences("the red fox runs", "the quick fox runs far")).toEqual([["red"], ["quick", "far"]]);
  expect(differences("same here", "same here")).toEqual([[], []]);
  expect(differences("", "all new")).toEqual([[], ["all", "new"]]);
  expect(differences("a b c d", "b d a")).toEqual([["a", "c"], ["a"]]);
});

test("splits words of any script, with their offsets", () => {
  expect(words("Año 7, 好的!")).toEqual([
    { text: "Año", start: 0 },
    { text: "7", start: 4 },
    { text: ",", start: 5 },
    { text: "好的", start: 7 },
    { text: "!", start: 9 },
  ]);
});

test("treats the middle of long texts as different instead of comparing all pairs", () => {
  const a = Array.from({ length: 50_000 }, (_, index) => `a${index}`);
  const b = Array.from({ length: 50_000 }, (_, index) => `b${index}`);
  const [left, right] = differingWords(["x", ...a, "y"], ["x", ...b, "y"]);
  expect([left.length, right.length, left[0], right.at(-1)]).toEqual([50_000, 50_000, 1, 50_000]);
});
