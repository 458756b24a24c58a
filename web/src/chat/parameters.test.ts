import { expect, test } from "vitest";
import { type Parameter, read, table, write } from "./parameters";

const PROPS = {
  default_generation_settings: { params: { temperature: 0.8, top_k: 40, stop: [], samplers: ["top_k"], stream: true, lora: [], ignore_eos: false } },
};

test("what both the settings and the document know, in the document's order, without what the page says itself", () => {
  const properties = {
    top_k: { type: ["integer", "null"], description: "K" },
    temperature: { type: ["number", "null"], description: "T" },
    stream: { type: ["boolean", "null"] },
    unknown: { type: "number" },
    samplers: { type: ["array", "string", "null"] },
    ignore_eos: { type: ["boolean", "null"] },
  };
  const document = {
    paths: { "/v1/chat/completions": { post: { requestBody: { content: { "application/json": { schema: { properties } } } } } } },
  };
  expect(table(PROPS, document).map(({ name, kind, default: value }) => [name, kind, value])).toEqual([
    ["top_k", "integer", 40],
    ["temperature", "number", 0.8],
    ["samplers", "list", ["top_k"]],
    ["ignore_eos", "boolean", false],
  ]);
});

test("without the document what the values tell", () => {
  expect(table(PROPS, null).map((one) => [one.name, one.kind])).toContainEqual(["temperature", "number"]);
});

const one = (kind: Parameter["kind"]): Parameter => ({ name: "x", kind, description: "", default: 0 });

test("typed values", () => {
  expect(read(one("number"), " 0.5 ")).toBe(0.5);
  expect(read(one("number"), "")).toBeUndefined();
  expect(() => read(one("integer"), "1.5")).toThrow("whole");
  expect(() => read(one("number"), "abc")).toThrow("number");
  expect(read(one("list"), "a, b")).toEqual(["a", "b"]);
  expect(read(one("list"), '["a,b"]')).toEqual(["a,b"]);
  expect(write(["a"])).toBe('["a"]');
});
