import { expect, test } from "vitest";
import { filtered, levelOf, merged, phases, type Asked, type Samples, type Slot } from "./state";

const SLOT: Slot = {
  id: 0, n_ctx: 100, busy: true, task: 1, used: 5, prompt: 5, cached: 0, computed: 5, predicted: 10, left: -1,
};
const ASKED: Asked = { number: 1, id: "a", at: 1000, path: "/completion", client: "127.0.0.1", started: null };

function samples(...at: number[]): Samples {
  const ones = at.map(() => 1);
  return { at, prompt: ones, answer: ones, running: ones, waiting: ones, cells: ones, first_token: at.map(() => null), errors: ones };
}

test("an event changes what it names, and goes on with what has a past", () => {
  let known = merged(null, { first: true, at: 1000, model: "m", waiting: 2, samples: samples(1, 2), log: [] }, 990);
  expect(known.ahead).toBe(10);
  known = merged(known, { at: 1001, waiting: 0, samples: samples(3), ended: [ASKED] }, 991);
  expect([known.model, known.waiting, known.samples.at, known.ended.length]).toEqual(["m", 0, [1, 2, 3], 1]);
  expect(known.samples.first_token).toEqual([null, null, null]);
  known = merged(known, { first: true, at: 1002, samples: samples(9) }, 992);
  expect([known.model, known.samples.at, known.ended]).toEqual([undefined, [9], []]);
});

test("no more is kept than an hour", () => {
  const hour = Array.from({ length: 3600 }, (_, second) => second);
  const known = merged(merged(null, { first: true, at: 0, samples: samples(...hour) }, 0), { at: 1, samples: samples(3600) }, 1);
  expect([known.samples.at.length, known.samples.at[0], known.samples.at.at(-1)]).toEqual([3600, 1, 3600]);
});

test("a slot's rate is that of its request's last seconds", () => {
  let known = merged(null, { first: true, at: 10, slots: [SLOT] }, 0);
  expect(known.rates.get(0)!.perSecond).toBe(0);
  for (const [at, predicted] of [[10.5, 30], [11, 50], [12.5, 70], [13.5, 80]] as const)
    known = merged(known, { at, slots: [{ ...SLOT, predicted }] }, 0);
  expect(known.rates.get(0)!.perSecond).toBe(10); // 70 → 80: what was before is longer ago
  known = merged(known, { at: 14, slots: [{ ...SLOT, task: 2, predicted: 1 }] }, 0);
  expect(known.rates.get(0)!.perSecond).toBe(0);
});

test("a request's time is divided where it got a slot and where its first token came", () => {
  const of = (more: Partial<Asked>, length: number) => phases({ ...ASKED, ...more }, length).map((p) => [p.phase, p.from, p.to]);
  expect(of({}, 2)).toEqual([["queue", 0, 2]]);
  expect(of({ started: 0.5 }, 2)).toEqual([["queue", 0, 0.5], ["prompt", 0.5, 2]]);
  expect(of({ started: 0.5, first: 1 }, 2)).toEqual([["queue", 0, 0.5], ["prompt", 0.5, 1], ["answer", 1, 2]]);
  expect(of({ first: 1 }, 2)).toEqual([["prompt", 0, 1], ["answer", 1, 2]]); // nobody saw when it began
  expect(of({ seconds: 0.1, status: 400 }, 0.1)).toEqual([["queue", 0, 0.1]]);
});

test("lines are found by level, text, request and model", () => {
  const lines = [
    { at: 1, level: "info", text: "all slots are idle" },
    { at: 2, level: "warning", text: "a Worker is gone", request: "abc" },
    { at: 3, level: "info", text: "2026-11-23 15:55:04.719 error: no memory", model: "m" },
  ];
  expect(lines.map(levelOf)).toEqual(["info", "warning", "error"]);
  expect(filtered(lines, "warning", "").map((line) => line.at)).toEqual([2, 3]);
  expect(filtered(lines, "info", "worker").map((line) => line.at)).toEqual([2]);
  expect(filtered(lines, "info", "abc").map((line) => line.at)).toEqual([2]);
  expect(filtered(lines, "info", "", "m").map((line) => line.at)).toEqual([3]);
});
