// The server's table of parameters: names and values from its settings, descriptions from its OpenAPI document.
import { signal } from "@preact/signals";
import { getJson } from "../api/http";
import { isRouter, type Props } from "../api/server";

/** What parameters are about, in the order in which they are shown. */
export const GROUPS = ["Sampling", "Length and end", "Repetition", "Less usual samplers", "Other"] as const;
export type Group = (typeof GROUPS)[number];

export interface Parameter {
  name: string;
  kind: "number" | "integer" | "boolean" | "text" | "list" | "object" | "json";
  description: string;
  /** What the server takes where nothing is asked for. */
  default: unknown;
  group: Group;
  /** Where it says something: of messages alone, or of a text without any. */
  only?: "chat" | "text";
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
  "stream n n_cmpl echo tools json_schema lora grammar_lazy grammar_triggers preserved_tokens n_probs logprobs timings_per_token return_progress return_tokens verbose receipt response_fields backend_sampling generation_prompt max_completion_tokens sse_ping_interval stream_options n_cache_reuse".split(" "),
);

const OF_GROUPS: [RegExp, Group][] = [
  [/^(seed|temperature|top_k|top_p|min_p|samplers)$/, "Sampling"],
  [/^(n_predict|max_tokens|stop|ignore_eos|t_max_predict_ms|n_indent|reasoning_\w+)$/, "Length and end"],
  [/^(repeat|presence|frequency|dry)_/, "Repetition"],
  [/^(dynatemp|xtc|typical|top_n_sigma|mirostat|adaptive)/, "Less usual samplers"],
];

/** Two names of one thing, of which each API has its own; and what is of no use without lines of code before it. */
const ONLY: Record<string, "chat" | "text"> = { max_tokens: "chat", n_predict: "text", n_indent: "text" };

function groupOf(name: string): Group {
  return OF_GROUPS.find(([pattern]) => pattern.test(name))?.[1] ?? "Other";
}

/** By the model's name; "": the only one. */
export const parameters = signal<Record<string, Parameter[]>>({});

const ANY_SEED = 0xffffffff;

function kindOf(schema: Schema): Parameter["kind"] | null {
  const types = [schema.type ?? []].flat();
  if (types.includes("boolean")) return "boolean";
  if (types.includes("number")) return "number";
  if (types.includes("integer")) return "integer";
  if (types.includes("array") && types.includes("string")) return "list";
  if (types.includes("object")) return "json";
  if (types.includes("array")) return "list";
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
    ({ name, kind, description }) => ({ name, kind, description, default: undefined, group: groupOf(name), only: "chat" }),
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
    // What has neither a default nor a description is no parameter of the table.
    if (OWN.has(name) || (!(name in defaults) && !one.description)) return [];
    const kind = kindOf(one);
    const usual = name === "seed" && defaults[name] === ANY_SEED ? -1 : defaults[name];
    const only = ONLY[name];
    return kind ? [{ name, kind, description: one.description ?? "", default: usual, group: groupOf(name), ...(only ? { only } : {}) }] : [];
  });
}

function guessed(value: unknown): Schema {
  if (Array.isArray(value)) return { type: ["array", "string"] };
  return { type: typeof value === "number" ? (Number.isInteger(value) ? "integer" : "number") : typeof value };
}

let document_: Promise<Document | null> | undefined;

/** Reads the table for a model of the server's. */
export async function readParameters(model: string): Promise<void> {
  if (!isRouter.value) document_ ??= getJson<Document>("openapi.json").catch(() => null); // a router has none
  const props = await getJson<Props>(model ? `props?model=${encodeURIComponent(model)}&autoload=false` : "props");
  parameters.value = { ...parameters.value, [model]: table(props, (await document_) ?? null) };
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
  if (parameter.kind === "json") return JSON.parse(typed) as unknown;
  if (parameter.kind === "list") {
    return typed.startsWith("[") ? (JSON.parse(typed) as unknown) : typed.split(",").map((part) => part.trim());
  }
  return text;
}

export function write(value: unknown): string {
  if (value === undefined || value === null) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
