// Tools that the page can run: the server's own (--tools and its MCP servers), and those of MCP servers whose
// URLs the user added.
import { computed, signal } from "@preact/signals";
import { getJson, postJson } from "../api/http";
import { isKnown, props, refreshProps } from "../api/server";
import { connectServers, remoteTools, type RunnableTool } from "./mcp";

interface Listed {
  tool: string;
  permissions?: { write?: boolean };
  definition: { function: { name: string; description?: string } };
}

const ownTools = signal<RunnableTool[]>([]);

/** All tools; the server's own take precedence over others of the same name. */
export const serverTools = computed(() => {
  const names = new Set(ownTools.value.map((one) => one.name));
  return [...ownTools.value, ...remoteTools.value.filter((one) => !names.has(one.name))];
});

/** Load the server's own tools, if it has any. */
export async function readServerTools(): Promise<void> {
  if (!props.value.tools_enabled) {
    ownTools.value = [];
    return;
  }
  const listed = await getJson<Listed[]>("tools").catch(() => []);
  ownTools.value = listed.map(({ tool, permissions, definition }) => ({
    name: tool,
    description: definition.function.description ?? "",
    writes: permissions?.write ?? false,
    address: "",
    schema: definition,
    run: async (params, stop) => resultText(await postJson<unknown>("tools", { tool, params }, stop)),
  }));
}

/** Load the tools with these names, if they are not loaded yet: an answer may end right after a reload. */
export async function loadMissingTools(names: readonly string[]): Promise<void> {
  if (names.every((name) => serverTools.value.some((one) => one.name === name))) return;
  if (!isKnown.value) await refreshProps();
  await Promise.all([readServerTools(), props.value.cors_proxy_enabled && connectServers()]);
}

function resultText(result: unknown): string {
  if (typeof result === "object" && result !== null) {
    const { plain_text_response: text, error } = result as { plain_text_response?: unknown; error?: unknown };
    if (typeof error === "string") return `Error: ${error}`;
    if (typeof text === "string") return text;
  }
  return JSON.stringify(result);
}

/** Return the schemas of the tools with these names. */
export async function toolSchemas(names: readonly string[]): Promise<unknown[]> {
  return serverTools.value.filter((one) => names.includes(one.name)).map((one) => one.schema);
}
