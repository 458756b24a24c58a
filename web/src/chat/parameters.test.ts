import { expect, test } from "vitest";
import { type Parameter, parseValue, listParameters, formatValue } from "./parameters";

const PROPS = {
  default_generation_settings: { params: { temperature: 0.8, top_k: 40, stop: [], samplers: ["top_k"], stream: true, lora: [], ignore_eos: false } },
};

test("lists described parameters with their defaults, without those that the page sets", () => {
  const properties = {
    top_k: { type: ["integer", "null"], description: "K" },
    temperature: { type: ["number", "null"], description: "T" },
    stream: { type: ["boolean", "null"] },
    unknown: { type: "number" },
    samplers: { type: ["array", "string", "null"] },
    ignore_eos: { type: ["boolean", "null"] },
    logit_bias: { type: ["array", "object", "null"], description: "B" },
    stop: { type: ["string", "array", "null"], description: "S" },
  };
  const document = {
    paths: { "/v1/chat/completions": { post: { requestBody: { content: { "application/json": { schema: { properties } } } } } } },
  };
  expect(listParameters(PROPS, document).map(({ name, kind, default: value }) => [name, kind, value])).toEqual([
    ["top_k", "integer", 40],
    ["temperature", "number", 0.8],
    ["samplers", "list", ["top_k"]],
    ["ignore_eos", "boolean", false],
    ["logit_bias", "json", undefined],
    ["stop", "list", []],
  ]);
  expect(listParameters(PROPS, document).map((found) => found.group).slice(0, 4)).toEqual(["sampling", "common", "sampling", "advanced"]);
});

test("guesses kinds from the defaults if there is no document", () => {
  expect(listParameters(PROPS, null).map((one) => [one.name, one.kind])).toContainEqual(["temperature", "number"]);
});

const one = (kind: Parameter["kind"]): Parameter => ({ name: "x", kind, description: "", default: 0, group: "advanced" });

test("parses typed values", () => {
  expect(parseValue(one("number"), " 0.5 ")).toBe(0.5);
  expect(parseValue(one("number"), "")).toBeUndefined();
  expect(() => parseValue(one("integer"), "1.5")).toThrow("whole");
  expect(() => parseValue(one("number"), "abc")).toThrow("number");
  expect(parseValue(one("list"), "a, b")).toEqual(["a", "b"]);
  expect(parseValue(one("list"), '["a,b"]')).toEqual(["a,b"]);
  expect(parseValue(one("json"), '[["yes", 5]]')).toEqual([["yes", 5]]);
  expect(formatValue(["a"])).toBe('["a"]');
});

test("offers the parameters that the chat template uses", () => {
  const properties = Object.fromEntries(
    ["reasoning_effort", "reasoning_budget_tokens", "parallel_tool_calls", "chat_template_kwargs"].map((name) => [name, {}]),
  );
  const document = {
    paths: { "/v1/chat/completions": { post: { requestBody: { content: { "application/json": { schema: { properties } } } } } } },
  };
  const names = (chat_template: string) => listParameters({ chat_template }, document).map((found) => found.name);
  expect(names("{{ messages }}")).toEqual(["chat_template_kwargs"]);
  expect(names("{% if enable_thinking %}<think>{% endif %}")).toEqual([
    "reasoning_effort", "reasoning_budget_tokens", "chat_template_kwargs",
  ]);
  expect(parseValue(one("object"), '{"enable_thinking": false}')).toEqual({ enable_thinking: false });
  expect(() => parseValue(one("object"), "[1]")).toThrow("object");
  expect(formatValue({ a: 1 })).toBe('{"a":1}');
});

test("shows the random seed as -1", () => {
  const props = { default_generation_settings: { params: { seed: 4294967295 } } };
  expect(listParameters(props, null)).toMatchObject([{ name: "seed", default: -1 }]);
});
