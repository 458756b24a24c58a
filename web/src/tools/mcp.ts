// Client of MCP servers over streamable HTTP, at URLs that the user added, through the server's proxy
// (https://modelcontextprotocol.io/specification, "Streamable HTTP").
import { computed, signal } from "@preact/signals";
import { ApiFailure, send } from "../api/http";
import { events } from "../api/sse";
import { labels } from "../text";
import { persistentSignal } from "../ui/persistent";

export interface RunnableTool {
  name: string;
  description: string;
  /** True if the tool may change something. */
  writes: boolean;
  /** URL of its MCP server; "" for the tools of this server. */
  address: string;
  /** Definition for a chat request. */
  schema: unknown;
  /** Run the tool and return its result as text for the model. Throws ApiFailure if there is none. */
  run: (args: Record<string, unknown>, signal: AbortSignal) => Promise<string>;
}

const REVISION = "2025-06-18";
const HEADER = "x-llama-server-proxy-header-"; // the proxy forwards headers with this prefix only
const MAX_PAGES = 50;

export interface McpState {
  state: "connecting" | "ready" | "failed";
  why: string;
  tools: RunnableTool[];
}

/** URLs of MCP servers. */
export const addresses = persistentSignal<string[]>("mcp", []);
export const states = signal<Record<string, McpState>>({});
export const remoteTools = computed(() => addresses.value.flatMap((one) => states.value[one]?.tools ?? []));

interface Reply {
  id?: number;
  result?: unknown;
  error?: { message?: string };
}

/** One session with a server. */
export class McpServer {
  private session = "";
  private next = 1;

  constructor(private readonly address: string) {}

  async open(): Promise<void> {
    this.session = "";
    await this.ask("initialize", {
      protocolVersion: REVISION,
      capabilities: {},
      clientInfo: { name: "llamado", version: "1" },
    });
    await this.post({ jsonrpc: "2.0", method: "notifications/initialized" });
  }

  /** Return the result of a request. Throws ApiFailure, or Error with the MCP server's message. */
  async ask(method: string, params: unknown, signal?: AbortSignal): Promise<unknown> {
    const id = this.next++;
    const response = await this.post({ jsonrpc: "2.0", id, method, params }, signal);
    for await (const reply of replies(response)) {
      if (reply.id !== id) continue;
      if (reply.error) throw new Error(reply.error.message ?? labels.value.tools.mcpRejected);
      return reply.result;
    }
    throw new Error(labels.value.tools.mcpClosed);
  }

  private async post(body: unknown, signal?: AbortSignal): Promise<Response> {
    const headers: Record<string, string> = {
      [`${HEADER}accept`]: "application/json, text/event-stream",
      [`${HEADER}content-type`]: "application/json",
      [`${HEADER}mcp-protocol-version`]: REVISION,
      ...(this.session ? { [`${HEADER}mcp-session-id`]: this.session } : {}),
    };
    const path = `cors-proxy?url=${encodeURIComponent(this.address)}`;
    const response = await send("POST", path, { body, headers, ...(signal ? { signal } : {}) });
    this.session = response.headers.get("mcp-session-id") ?? this.session;
    return response;
  }
}

async function* replies(response: Response): AsyncGenerator<Reply> {
  if ((response.headers.get("content-type") ?? "").includes("text/event-stream")) {
    if (response.body) for await (const event of events(response.body)) yield JSON.parse(event.data) as Reply;
    return;
  }
  const found = JSON.parse(await response.text()) as Reply | Reply[];
  yield* Array.isArray(found) ? found : [found];
}

interface Described {
  name: string;
  description?: string;
  inputSchema?: unknown;
  annotations?: { readOnlyHint?: boolean };
}

async function toolsOf(address: string): Promise<RunnableTool[]> {
  const server = new McpServer(address);
  await server.open();
  const found: Described[] = [];
  let cursor: string | undefined;
  for (let page = 0; page < MAX_PAGES; page++) {
    const listed = (await server.ask("tools/list", cursor ? { cursor } : {})) as { tools: Described[]; nextCursor?: string };
    found.push(...listed.tools);
    cursor = listed.nextCursor;
    if (!cursor) break;
  }
  return found.map(({ name, description = "", inputSchema, annotations }) => ({
    name,
    description,
    writes: annotations?.readOnlyHint !== true,
    address,
    schema: { type: "function", function: { name, description, parameters: inputSchema ?? { type: "object" } } },
    run: async (args, signal) => {
      const call = () => server.ask("tools/call", { name, arguments: args }, signal);
      try {
        return resultText(await call());
      } catch (error) {
        if (!(error instanceof ApiFailure) || error.status !== 404) throw error;
        await server.open(); // the session has expired
        return resultText(await call());
      }
    },
  }));
}

function resultText(result: unknown): string {
  const { content, isError } = result as { content?: { type: string; text?: string }[]; isError?: boolean };
  const text = (content ?? []).map((part) => (part.type === "text" ? part.text : JSON.stringify(part))).join("\n");
  return isError ? `Error: ${text}` : text;
}

/** Connect to new servers; `again`: also to those that failed. */
export async function connectServers(again = false): Promise<void> {
  await Promise.all(
    addresses.value.map(async (address) => {
      const before = states.peek()[address];
      if (before && !(again && before.state === "failed")) return;
      const put = (state: McpState) => (states.value = { ...states.value, [address]: state });
      put({ state: "connecting", why: "", tools: [] });
      try {
        put({ state: "ready", why: "", tools: await toolsOf(address) });
      } catch (error) {
        put({ state: "failed", why: error instanceof Error ? error.message : String(error), tools: [] });
      }
    }),
  );
}

/** Add a server's URL. Throws an Error if it is invalid. */
export function addServer(text: string): void {
  const { href, protocol } = new URL(text.trim());
  if (protocol !== "http:" && protocol !== "https:") throw new Error(labels.value.tools.wrongProtocol);
  if (!addresses.value.includes(href)) addresses.value = [...addresses.value, href];
  void connectServers(true);
}

export function removeServer(address: string): void {
  addresses.value = addresses.value.filter((one) => one !== address);
  const { [address]: _, ...others } = states.value;
  states.value = others;
}
