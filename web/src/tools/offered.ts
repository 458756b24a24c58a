// The tools that can be run from here: the server's own (--tools, its MCP servers), and those of MCP servers whose
// addresses the reader gave.
import { computed, signal } from "@preact/signals";
import { getJson, postJson } from "../api/http";
import { props } from "../api/server";
import { remoteTools, type RunnableTool } from "./mcp";

interface Listed {
  tool: string;
  permissions?: { write?: boolean };
  definition: { function: { name: string; description?: string } };
}

const own = signal<RunnableTool[]>([]);

/** All tools; of two with one name the server's own. */
export const serverTools = computed(() => {
  const names = new Set(own.value.map((one) => one.name));
  return [...own.value, ...remoteTools.value.filter((one) => !names.has(one.name))];
});

/** Reads the server's own tools, where it says that it has any. */
export async function readServerTools(): Promise<void> {
  if (!props.value.tools_enabled) {
    own.value = [];
    return;
  }
  const listed = await getJson<Listed[]>("tools").catch(() => []);
  own.value = listed.map(({ tool, permissions, definition }) => ({
    name: tool,
    description: definition.function.description ?? "",
    writes: permissions?.write ?? false,
    where: "on the server",
    schema: definition,
    run: async (params, stop) => told(await postJson<unknown>("tools", { tool, params }, stop)),
  }));
}

function told(result: unknown): string {
  if (typeof result === "object" && result !== null) {
    const { plain_text_response: text, error } = result as { plain_text_response?: unknown; error?: unknown };
    if (typeof error === "string") return `Error: ${error}`;
    if (typeof text === "string") return text;
  }
  return JSON.stringify(result);
}

/** The schemas of the tools with these names. */
export async function offered(names: readonly string[]): Promise<unknown[]> {
  return serverTools.value.filter((one) => names.includes(one.name)).map((one) => one.schema);
}
