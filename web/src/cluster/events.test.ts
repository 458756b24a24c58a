import { expect, it } from "vitest";
import { afterMessage } from "./events";
import type { ClusterBody, Replacement } from "../api/schema";

const body: ClusterBody = {
  model: "a/b",
  devices: [],
  tokens_per_second: 1,
  token_seconds: { compute: 1, link: 2, waiting: 3, total: 6 },
  predicted_seconds: null,
  events: [{ at: 1, kind: "lost", device: "RPC0", what: "gone" }],
};
const whole = { sequence: 4, cluster: body };
const change = (path: string, value: unknown): Replacement => ({ op: "replace", path, value });

it("replaces fields, members of lists and the whole view", () => {
  const patch = [change("/token_seconds/link", 5), change("/events/0/what", "back"), change("/predicted_seconds", 0.5)];
  const after = afterMessage(whole, { sequence: 5, patch });
  expect(after).toEqual({
    sequence: 5,
    cluster: {
      ...body,
      token_seconds: { ...body.token_seconds, link: 5 },
      events: [{ ...body.events[0], what: "back" }],
      predicted_seconds: 0.5,
    },
  });
  expect(body.token_seconds?.link).toBe(2);
  expect(afterMessage(after, { sequence: 6, patch: [change("", body)] })).toEqual({ sequence: 6, cluster: body });
});

it("decodes the escapes of paths", () => {
  const odd = { sequence: 1, cluster: { "a/b~": 1 } as unknown as ClusterBody };
  expect(afterMessage(odd, { sequence: 2, patch: [change("/a~1b~0", 2)] })?.cluster).toEqual({ "a/b~": 2 });
});

it("notices a missing message, and starts again with a whole view", () => {
  expect(afterMessage(whole, { sequence: 6, patch: [] })).toBeNull();
  expect(afterMessage(null, { sequence: 1, patch: [] })).toBeNull();
  expect(afterMessage(whole, { sequence: 9, cluster: body })?.sequence).toBe(9);
});
