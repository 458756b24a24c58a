// Requests to the server that this page was loaded from. The page sends requests nowhere else.
import { signal } from "@preact/signals";
import { labels } from "../text";
import { persistentSignal } from "../ui/persistent";
import { events } from "./sse";

/** The API key (--api-key) that the user entered. */
export const apiKey = persistentSignal("key", "");
/** True after the server rejected a request for lack of a valid key. */
export const isKeyRequired = signal(false);

export class ApiFailure extends Error {
  constructor(
    message: string,
    /** HTTP status; 0 if the server was unreachable. */
    readonly status: number,
    readonly type = "",
    /** True if it was an event of a stream. */
    readonly isEvent = false,
  ) {
    super(message);
    this.name = "ApiFailure";
  }
}

/** Return the URL of a server path; the page may be served below a prefix. */
export function url(path: string): string {
  return new URL(path.replace(/^\//, ""), document.baseURI.replace(/[?#].*$/, "")).href;
}

export interface Options {
  body?: unknown;
  signal?: AbortSignal | undefined;
  headers?: Record<string, string>;
  /** True if the request goes on after the page is left. */
  keepalive?: boolean;
  /** Called before each event of a stream with the bytes of the stream up to its end. */
  onEvent?: (end: number) => void;
}

/** Send a request and return its successful response. Throws ApiFailure with the server's message. */
export async function send(method: string, path: string, options: Options = {}): Promise<Response> {
  const headers: Record<string, string> = { ...options.headers };
  if (options.body !== undefined) headers["Content-Type"] = "application/json";
  if (apiKey.value) headers["Authorization"] = `Bearer ${apiKey.value}`;
  let response: Response;
  try {
    response = await fetch(url(path), {
      method,
      headers,
      ...(options.body === undefined ? {} : { body: JSON.stringify(options.body) }),
      ...(options.signal ? { signal: options.signal } : {}),
      ...(options.keepalive ? { keepalive: true } : {}),
    });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiFailure(labels.value.errors.unreachable, 0);
  }
  if (response.ok) return response;
  if (response.status === 401) isKeyRequired.value = true;
  throw await failure(response);
}

async function failure(response: Response): Promise<ApiFailure> {
  const text = await response.text().catch(() => "");
  try {
    const body = JSON.parse(text) as { error?: { message?: string; type?: string } | string; message?: string };
    const error = body.error ?? { message: body.message ?? text.slice(0, 300) };
    if (typeof error === "string") return new ApiFailure(error, response.status);
    return new ApiFailure(error.message ?? text, response.status, error.type);
  } catch {
    return new ApiFailure(text.slice(0, 300) || response.statusText, response.status);
  }
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await (await send("GET", path, { signal })).json()) as T;
}

/** Yield from a body reader, with read errors as ApiFailure. */
async function* withConnectionErrors<T>(items: AsyncGenerator<T>, signal?: AbortSignal): AsyncGenerator<T> {
  try {
    yield* items;
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiFailure(labels.value.errors.connectionLost, 0);
  }
}

export async function postJson<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  return (await (await send("POST", path, { body, signal })).json()) as T;
}

/**
 * Send a request and yield each event of its stream as parsed JSON, until the stream ends or `signal` aborts it. Throws
 * ApiFailure, also if the connection is lost.
 */
export async function* stream(method: string, path: string, options: Options = {}): AsyncGenerator<unknown> {
  const response = await send(method, path, options);
  if (!response.body) return;
  for await (const event of withConnectionErrors(events(response.body), options.signal)) {
    if (event.data === "[DONE]") return;
    options.onEvent?.(event.end);
    const data: unknown = JSON.parse(event.data);
    if (typeof data === "object" && data !== null && "error" in data) {
      const error = (data as { error: { message?: string; code?: number; type?: string } }).error;
      throw new ApiFailure(error.message ?? labels.value.errors.streamFailed, error.code ?? 500, error.type, true);
    }
    yield data;
  }
}
