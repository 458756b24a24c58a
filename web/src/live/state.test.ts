import { expect, test } from "vitest";
import { filterLines, levelOf, applyUpdate, phases, type LiveRequest, type Samples, type Slot } from "./state";

const SLOT: Slot = {
  id: 0, n_ctx: 100, busy: true, task: 1, used: 5, prompt: 5, cached: 0, computed: 5, predicted: 10, left: -1,
};
const REQUEST: LiveRequest = { number: 1, id: "a", at: 1000, path: "/completion", client: "127.0.0.1", started: null };

function samples(...at: number[]): Samples {
  const ones = at.map(() => 1);
  return { at, prompt: ones, answer: ones, running: ones, waiting: ones, cells: ones, first_token: at.map(() => null), errors: ones };
}

test("replaces the fields of an event and appends to histories", () => {
  let state = applyUpdate(null, { first: true, at: 1000, model: "m", waiting: 2, samples: samples(1, 2), log: [] }, 990);
  expect(state.ahead).toBe(10);
  state = applyUpdate(state, { at: 1001, waiting: 0, samples: samples(3), ended: [REQUEST] }, 991);
  expect([state.model, state.waiting, state.samples.at, state.ended.length]).toEqual(["m", 0, [1, 2, 3], 1]);
  expect(state.samples.first_token).toEqual([null, null, null]);
  state = applyUpdate(state, { first: true, at: 1002, samples: samples(9) }, 992);
  expect([state.model, state.samples.at, state.ended]).toEqual([undefined, [9], []]);
});

test("keeps an hour of samples", () => {
  const hour = Array.from({ length: 3600 }, (_, second) => second);
  const state = applyUpdate(applyUpdate(null, { first: true, at: 0, samples: samples(...hour) }, 0), { at: 1, samples: samples(3600) }, 1);
  expect([state.samples.at.length, state.samples.at[0], state.samples.at.at(-1)]).toEqual([3600, 1, 3600]);
});

test("computes a slot's rate over the last seconds of its request", () => {
  let state = applyUpdate(null, { first: true, at: 10, slots: [SLOT] }, 0);
  expect(state.rates.get(0)!.perSecond).toBe(0);
  for (const [at, predicted] of [[10.5, 30], [11, 50], [12.5, 70], [13.5, 80]] as const)
    state = applyUpdate(state, { at, slots: [{ ...SLOT, predicted }] }, 0);
  expect(state.rates.get(0)!.perSecond).toBe(10); // 70 → 80: earlier points are outside of the window
  state = applyUpdate(state, { at: 14, slots: [{ ...SLOT, task: 2, predicted: 1 }] }, 0);
  expect(state.rates.get(0)!.perSecond).toBe(0);
});

test("splits a request's time at its slot and at its first token", () => {
  const of = (more: Partial<LiveRequest>, length: number) => phases({ ...REQUEST, ...more }, length).map((p) => [p.phase, p.from, p.to]);
  expect(of({}, 2)).toEqual([["queue", 0, 2]]);
  expect(of({ started: 0.5 }, 2)).toEqual([["queue", 0, 0.5], ["prompt", 0.5, 2]]);
  expect(of({ started: 0.5, first: 1 }, 2)).toEqual([["queue", 0, 0.5], ["prompt", 0.5, 1], ["generation", 1, 2]]);
  expect(of({ first: 1 }, 2)).toEqual([["prompt", 0, 1], ["generation", 1, 2]]); // it started before the page listened
  expect(of({ seconds: 0.1, status: 400 }, 0.1)).toEqual([["queue", 0, 0.1]]);
});

test("filters lines by level, text, request and model", () => {
  const lines = [
    { at: 1, level: "info", text: "all slots are idle" },
    { at: 2, level: "warning", text: "a Worker is gone", request: "abc" },
    { at: 3, level: "info", text: "2026-11-23 15:55:04.719 error: no memory", model: "m" },
  ];
  expect(lines.map(levelOf)).toEqual(["info", "warning", "error"]);
  expect(filterLines(lines, "warning", "").map((line) => line.at)).toEqual([2, 3]);
  expect(filterLines(lines, "info", "worker").map((line) => line.at)).toEqual([2]);
  expect(filterLines(lines, "info", "abc").map((line) => line.at)).toEqual([2]);
  expect(filterLines(lines, "info", "", "m").map((line) => line.at)).toEqual([3]);
});
