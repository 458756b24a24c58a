import { describe, expect, it } from "vitest";
import { layoutOf, assignPlaces, partsOf, placeToGive, placeToTake, isSameLayout } from "./layout";

const LAYOUT = ["a", "a", "b", "b", "c"]; // four layers and the head

describe("a layout", () => {
  it("converts to parts and back", () => {
    const parts = partsOf(LAYOUT);
    expect(parts).toEqual([
      { device: "a", layers: [0, 1], head: false },
      { device: "b", layers: [2, 3], head: false },
      { device: "c", layers: [], head: true },
    ]);
    expect(layoutOf(parts)).toEqual(LAYOUT);
  });

  it("assigns all places between two, in either order", () => {
    expect(assignPlaces(LAYOUT, 3, 1, "c")).toEqual(["a", "c", "c", "c", "c"]);
    expect(isSameLayout(assignPlaces(LAYOUT, 0, 1, "a"), LAYOUT)).toBe(true);
    expect(isSameLayout(assignPlaces(LAYOUT, 0, 2, "a"), LAYOUT)).toBe(false);
  });

  it("finds the places that can move at each edge", () => {
    expect(placeToTake(LAYOUT, "b", "start")).toBe(1);
    expect(placeToTake(LAYOUT, "b", "end")).toBe(4);
    expect(placeToTake(LAYOUT, "c", "end")).toBeNull();
    expect(placeToTake(LAYOUT, "idle", "end")).toBe(3);
    expect(placeToTake(LAYOUT, "idle", "start")).toBeNull();
    expect(placeToGive(LAYOUT, "b", "start")).toEqual({ place: 2, to: "a" });
    expect(placeToGive(LAYOUT, "b", "end")).toEqual({ place: 3, to: "c" });
    expect(placeToGive(LAYOUT, "a", "start")).toBeNull();
    expect(placeToGive(LAYOUT, "idle", "end")).toBeNull();
  });
});
