// The server's table of parameters: names and values from its settings, descriptions from its OpenAPI document.
import { signal } from "@preact/signals";
import { getJson } from "../api/http";
import type { Props } from "../api/server";

export interface Parameter {
  name: string;
  kind: "number" | "integer" | "boolean" | "text" | "list" | "object";
  description: string;
  /** What the server takes where nothing is asked for. */
  default: unknown;
  /** Whether it says something of messages, and nothing of a text alone. */
  chat?: boolean;
}

interface Schema {
  type?: string | string[];
  description?: string;
}

interface Document {
  paths: Record<
    string,
    { post?: { requestBody?: { content: { "application/json": { schema: { properties?: Record<string, Schema> } } } } } }
  >;
}

// What the page says itself with each request, and what only says how an answer is sent.
const OWN = new Set(
  "stream n n_cmpl echo tools grammar json_schema lora grammar_lazy grammar_triggers preserved_tokens n_probs logprobs timings_per_token return_progress return_tokens verbose receipt response_fields backend_sampling generation_prompt".split(" "),
);

/** By the model's name; "": the only one. */
export const parameters = signal<Record<string, Parameter[]>>({});

const ANY_SEED = 0xffffffff;

function kindOf(schema: Schema, value: unknown): Parameter["kind"] | null {
  const types = [schema.type ?? []].flat();
  if (types.includes("boolean")) return "boolean";
  if (types.includes("number")) return "number";
  if (types.includes("integer")) return "integer";
  if (types.includes("array") && types.includes("string")) return "list";
  if (types.includes("array") && Array.isArray(value)) return "list";
  return types.includes("string") ? "text" : null;
}

/** The parameters of chats, in the order of the server's table. */
export function table(props: Props, document: Document | null): Parameter[] {
  return [...ofMessages(props, document), ...ofTokens(props, document)];
}

// What a chat's template makes of a request, where the template speaks of it.
const OF_MESSAGES: { name: string; kind: Parameter["kind"]; where: RegExp; description: string }[] = [
  { name: "reasoning_effort", kind: "text", where: /reasoning_effort|enable_thinking|<think>/, description: "how long to think: none, low, medium, high" },
  { name: "reasoning_budget_tokens", kind: "integer", where: /think|reasoning/, description: "most tokens of thoughts (-1: any number)" },
  { name: "parallel_tool_calls", kind: "boolean", where: /tool/, description: "several tool calls in one answer" },
  { name: "chat_template_kwargs", kind: "object", where: /^/, description: "variables of the template, as a JSON object" },
];

function ofMessages(props: Props, document: Document | null): Parameter[] {
  const known = chatSchema(document);
  return OF_MESSAGES.filter(({ name, where }) => known && name in known && where.test(props.chat_template ?? "")).map(
    ({ name, kind, description }) => ({ name, kind, description, default: undefined, chat: true }),
  );
}

function chatSchema(document: Document | null): Record<string, Schema> | undefined {
  return document?.paths["/v1/chat/completions"]?.post?.requestBody?.content["application/json"].schema.properties;
}

function ofTokens(props: Props, document: Document | null): Parameter[] {
  const defaults = props.default_generation_settings?.params ?? {};
  const described: Record<string, Schema> =
    chatSchema(document) ?? Object.fromEntries(Object.entries(defaults).map(([name, value]) => [name, guessed(value)]));
  return Object.entries(described).flatMap(([name, one]) => {
    if (!(name in defaults) || OWN.has(name)) return [];
    const kind = kindOf(one, defaults[name]);
    const usual = name === "seed" && defaults[name] === ANY_SEED ? -1 : defaults[name];
    return kind ? [{ name, kind, description: one.description ?? "", default: usual }] : [];
  });
}

function guessed(value: unknown): Schema {
  if (Array.isArray(value)) return { type: ["array", "string"] };
  return { type: typeof value === "number" ? (Number.isInteger(value) ? "integer" : "number") : typeof value };
}

let document_: Promise<Document | null> | undefined;

/** Reads the table for a model of the server's. */
export async function readParameters(model: string): Promise<void> {
  document_ ??= getJson<Document>("openapi.json").catch(() => null);
  const props = await getJson<Props>(model ? `props?model=${encodeURIComponent(model)}&autoload=false` : "props");
  parameters.value = { ...parameters.value, [model]: table(props, await document_) };
}

/** A typed text as a value of the parameter; undefined: as the server has it. Throws an Error that says what is wrong. */
export function read(parameter: Parameter, text: string): unknown {
  const typed = text.trim();
  if (typed === "") return undefined;
  if (parameter.kind === "number" || parameter.kind === "integer") {
    const value = Number(typed);
    if (!Number.isFinite(value)) throw new Error("expected a number");
    if (parameter.kind === "integer" && !Number.isInteger(value)) throw new Error("expected a whole number");
    return value;
  }
  if (parameter.kind === "object") {
    const value: unknown = JSON.parse(typed);
    if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("expected a JSON object");
    return value;
  }
  if (parameter.kind === "list") {
    return typed.startsWith("[") ? (JSON.parse(typed) as unknown) : typed.split(",").map((part) => part.trim());
  }
  return text;
}

export function write(value: unknown): string {
  if (value === undefined || value === null) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
