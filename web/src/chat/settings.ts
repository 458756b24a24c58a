// What a conversation asks of the model, beside its messages.
import { modelFor } from "../api/server";
import { remembered } from "../ui/remembered";

export interface Settings {
  /** Of a router's models; "": whichever is loaded. */
  model: string;
  system: string;
  /** Parameters by name; what is not here is as the server has it. */
  parameters: Record<string, unknown>;
  /** JSON schema of the answer, as text; "": any answer. */
  schema: string;
  /** The tools of the request, as JSON text; "": none. */
  tools: string;
  /** Names of the server's own tools that are offered. */
  serverTools: string[];
  /** Names of those that run without being asked about. */
  autoTools: string[];
  /** Likeliest tokens asked for at each place; 0: none. */
  probs: number;
}

export const NO_SETTINGS: Settings = {
  model: "",
  system: "",
  parameters: {},
  schema: "",
  tools: "",
  serverTools: [],
  autoTools: [],
  probs: 0,
};

/** What a new conversation begins with: what the last one had. */
export const lastSettings = remembered<Settings>("settings", NO_SETTINGS);

/** The part of a request that settings are. Throws an Error that names the field for JSON that is none. */
export function asRequest(settings: Settings, tools: readonly unknown[] = []): Record<string, unknown> {
  const request: Record<string, unknown> = { ...settings.parameters };
  const model = modelFor(settings.model);
  if (model) request["model"] = model;
  if (settings.schema.trim()) {
    const schema = parsed(settings.schema, "The JSON schema");
    request["response_format"] = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  const typed = settings.tools.trim() ? parsed(settings.tools, "The tools") : [];
  if (!Array.isArray(typed)) throw new Error("The tools must be a JSON array.");
  const all = [...typed, ...tools];
  if (all.length) request["tools"] = all;
  // Servers refuse both in one stream.
  if (settings.probs > 0 && !all.length) {
    request["logprobs"] = true;
    request["top_logprobs"] = settings.probs;
  }
  return request;
}

function parsed(text: string, what: string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${what}: ${error instanceof Error ? error.message : String(error)}`);
  }
}
