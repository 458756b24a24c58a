// The server's table of parameters: names and values from its settings, descriptions from its OpenAPI document.
import { signal } from "@preact/signals";
import { getJson } from "../api/http";
import type { Props } from "../api/server";

export interface Parameter {
  name: string;
  kind: "number" | "integer" | "boolean" | "text" | "list";
  description: string;
  /** What the server takes where nothing is asked for. */
  default: unknown;
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

export const parameters = signal<Parameter[]>([]);

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
  const defaults = props.default_generation_settings?.params ?? {};
  const schema = document?.paths["/v1/chat/completions"]?.post?.requestBody?.content["application/json"].schema;
  const described: Record<string, Schema> =
    schema?.properties ?? Object.fromEntries(Object.entries(defaults).map(([name, value]) => [name, guessed(value)]));
  return Object.entries(described).flatMap(([name, one]) => {
    if (!(name in defaults) || OWN.has(name)) return [];
    const kind = kindOf(one, defaults[name]);
    return kind ? [{ name, kind, description: one.description ?? "", default: defaults[name] }] : [];
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
  parameters.value = table(props, await document_);
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
  if (parameter.kind === "list") {
    return typed.startsWith("[") ? (JSON.parse(typed) as unknown) : typed.split(",").map((part) => part.trim());
  }
  return text;
}

export function write(value: unknown): string {
  if (value === undefined || value === null) return "";
  return Array.isArray(value) ? JSON.stringify(value) : String(value);
}
