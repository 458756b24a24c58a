// Settings of a conversation: the fields of its requests other than messages.
import { modelFor } from "../api/server";
import { labels } from "../text";
import { persistentSignal } from "../ui/persistent";

export interface Settings {
  /** One of a router's models; "" for any loaded one. */
  model: string;
  system: string;
  /** Parameters by name; others have the server's defaults. */
  parameters: Record<string, unknown>;
  /** JSON schema of the answer, as text; "" for none. */
  schema: string;
  /** Tool definitions, as JSON text; "" for none. */
  tools: string;
  /** Names of the enabled tools of the server and of MCP servers. */
  serverTools: string[];
  /** Names of the tools that run without confirmation. */
  autoTools: string[];
  /** Number of likely tokens to return at each position; 0 for none. */
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

/** Settings of the last conversation, used for a new one. */
export const lastSettings = persistentSignal<Settings>("settings", NO_SETTINGS);

/** Return the fields of a chat request. Throws an Error that names the field whose JSON is invalid. */
export function requestFields(settings: Settings, tools: readonly unknown[] = []): Record<string, unknown> {
  const request: Record<string, unknown> = { ...settings.parameters };
  const model = modelFor(settings.model);
  if (model) request["model"] = model;
  if (settings.schema.trim()) {
    const schema = parseJson(settings.schema, labels.value.settings.invalidSchema);
    request["response_format"] = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  const typed = settings.tools.trim() ? parseJson(settings.tools, labels.value.settings.invalidTools) : [];
  if (!Array.isArray(typed)) throw new Error(labels.value.settings.toolsNotArray);
  const all = [...typed, ...tools];
  if (all.length) request["tools"] = all;
  // The server rejects probabilities in streams with tools.
  if (settings.probs > 0 && !all.length) {
    request["logprobs"] = true;
    request["top_logprobs"] = settings.probs;
  }
  return request;
}

function parseJson(text: string, describe: (why: string) => string): unknown {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(describe(error instanceof Error ? error.message : String(error)));
  }
}
