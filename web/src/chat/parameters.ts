// Parameters of requests: names and defaults from the server's settings, descriptions from its OpenAPI document.
import { signal } from "@preact/signals";
import { getJson } from "../api/http";
import { isRouter, type Props } from "../api/server";
import { labels } from "../text";

/** Groups that are folded, in the order of the settings panel. */
export const FOLDED_GROUPS = ["sampling", "penalties", "advanced"] as const;
export type FoldedGroup = (typeof FOLDED_GROUPS)[number];

export interface Parameter {
  name: string;
  kind: "number" | "integer" | "boolean" | "text" | "list" | "object" | "json";
  /** The server's; "" for parameters of the chat template. See `describe`. */
  description: string;
  /** The value that the server uses by default. */
  default: unknown;
  group: "common" | FoldedGroup;
  /** Set if the parameter applies to chats alone, or to raw text alone. */
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

// Set by the page itself, or about the form of the response only.
const EXCLUDED = new Set(
  "stream n n_cmpl echo tools json_schema lora grammar_lazy grammar_triggers preserved_tokens n_probs logprobs timings_per_token return_progress return_tokens verbose receipt response_fields backend_sampling generation_prompt max_completion_tokens sse_ping_interval stream_options n_cache_reuse".split(" "),
);

/** Parameters that are shown first, in this order. */
const COMMON = ["temperature", "top_p", "max_tokens", "n_predict"];
const GROUP_PATTERNS: [RegExp, FoldedGroup][] = [
  [/^(seed|samplers|top_k|min_p|min_keep|dynatemp|xtc|typical|top_n_sigma|mirostat|adaptive)/, "sampling"],
  [/^(repeat|presence|frequency|dry)_/, "penalties"],
];

/** APIs have different names for the token limit; n_indent applies to lines of code before the answer. */
const ONLY: Record<string, "chat" | "text"> = { max_tokens: "chat", n_predict: "text", n_indent: "text" };

function groupOf(name: string): Parameter["group"] {
  if (COMMON.includes(name)) return "common";
  return GROUP_PATTERNS.find(([pattern]) => pattern.test(name))?.[1] ?? "advanced";
}

/** Return the parameters that are shown first. */
export function commonParameters(all: readonly Parameter[]): Parameter[] {
  return COMMON.flatMap((name) => all.find((one) => one.name === name) ?? []);
}

/** Parameters by model name; "": the only model. */
export const parameters = signal<Record<string, Parameter[]>>({});

const RANDOM_SEED = 0xffffffff;

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

/** Return the parameters, in the order of the server's table. */
export function listParameters(props: Props, document: Document | null): Parameter[] {
  return [...templateParameters(props, document), ...samplingParameters(props, document)];
}

// Parameters of the chat template; `where` matches templates that use one.
const TEMPLATE_PARAMETERS: { name: string; kind: Parameter["kind"]; where: RegExp }[] = [
  { name: "reasoning_effort", kind: "text", where: /reasoning_effort|enable_thinking|<think>/ },
  { name: "reasoning_budget_tokens", kind: "integer", where: /think|reasoning/ },
  { name: "parallel_tool_calls", kind: "boolean", where: /tool/ },
  { name: "chat_template_kwargs", kind: "object", where: /^/ },
];

function templateParameters(props: Props, document: Document | null): Parameter[] {
  const schema = chatSchema(document);
  return TEMPLATE_PARAMETERS.filter(({ name, where }) => schema && name in schema && where.test(props.chat_template ?? "")).map(
    ({ name, kind }) => ({ name, kind, description: "", default: undefined, group: groupOf(name), only: "chat" }),
  );
}

function chatSchema(document: Document | null): Record<string, Schema> | undefined {
  return document?.paths["/v1/chat/completions"]?.post?.requestBody?.content["application/json"].schema.properties;
}

function samplingParameters(props: Props, document: Document | null): Parameter[] {
  const defaults = props.default_generation_settings?.params ?? {};
  const described: Record<string, Schema> =
    chatSchema(document) ?? Object.fromEntries(Object.entries(defaults).map(([name, value]) => [name, guessSchema(value)]));
  return Object.entries(described).flatMap(([name, one]) => {
    // Fields with neither a default nor a description are no parameters.
    if (EXCLUDED.has(name) || (!(name in defaults) && !one.description)) return [];
    const kind = kindOf(one);
    const usual = name === "seed" && defaults[name] === RANDOM_SEED ? -1 : defaults[name];
    const only = ONLY[name];
    return kind ? [{ name, kind, description: one.description ?? "", default: usual, group: groupOf(name), ...(only ? { only } : {}) }] : [];
  });
}

function guessSchema(value: unknown): Schema {
  if (Array.isArray(value)) return { type: ["array", "string"] };
  return { type: typeof value === "number" ? (Number.isInteger(value) ? "integer" : "number") : typeof value };
}

let openApiDocument: Promise<Document | null> | undefined;

/** Load the parameters of a model. */
export async function readParameters(model: string): Promise<void> {
  if (!isRouter.value) openApiDocument ??= getJson<Document>("openapi.json").catch(() => null); // routers have no OpenAPI document
  const props = await getJson<Props>(model ? `props?model=${encodeURIComponent(model)}&autoload=false` : "props");
  parameters.value = { ...parameters.value, [model]: listParameters(props, (await openApiDocument) ?? null) };
}

/**
 * Parse user input as a value of the parameter; undefined for the server's default. Throws an Error that names the
 * problem.
 */
export function parseValue(parameter: Parameter, text: string): unknown {
  const typed = text.trim();
  if (typed === "") return undefined;
  if (parameter.kind === "number" || parameter.kind === "integer") {
    const value = Number(typed);
    if (!Number.isFinite(value)) throw new Error(labels.value.settings.expectedNumber);
    if (parameter.kind === "integer" && !Number.isInteger(value)) throw new Error(labels.value.settings.expectedInteger);
    return value;
  }
  if (parameter.kind === "object") {
    const value: unknown = JSON.parse(typed);
    if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error(labels.value.settings.expectedObject);
    return value;
  }
  if (parameter.kind === "json") return JSON.parse(typed) as unknown;
  if (parameter.kind === "list") {
    return typed.startsWith("[") ? (JSON.parse(typed) as unknown) : typed.split(",").map((part) => part.trim());
  }
  return text;
}

/** Return the description of a parameter. The server's own are English. */
export function describe({ name, description }: Parameter): string {
  return description || (labels.value.settings.templateParameters[name] ?? "");
}

export function formatValue(value: unknown): string {
  if (value === undefined || value === null) return "";
  return typeof value === "object" ? JSON.stringify(value) : String(value);
}
