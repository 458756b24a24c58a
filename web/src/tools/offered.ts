// The server's own tools (--tools, MCP servers), where it has any.
import { signal } from "@preact/signals";

export interface ServerTool {
  name: string;
  description: string;
  /** As a chat request has it. */
  schema: unknown;
}

export const serverTools = signal<ServerTool[]>([]);

export async function readServerTools(): Promise<void> {
  // nothing yet
}

/** The schemas of the tools with these names. */
export async function offered(names: readonly string[]): Promise<unknown[]> {
  return serverTools.value.filter((one) => names.includes(one.name)).map((one) => one.schema);
}
