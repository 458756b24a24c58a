// Requests to the server this page came from, and to nothing else.
import { signal } from "@preact/signals";
import { remembered } from "../ui/remembered";
import { events } from "./sse";

/** The key of --api-key, once somebody has typed it. */
export const apiKey = remembered("key", "");
/** Whether the server has refused a request for want of a key. */
export const keyWanted = signal(false);

export class ApiFailure extends Error {
  constructor(
    message: string,
    /** HTTP status; 0: the server could not be reached. */
    readonly status: number,
    readonly type = "",
  ) {
    super(message);
    this.name = "ApiFailure";
  }
}

/** The address of a path of the server; the page may lie behind a prefix. */
export function url(path: string): string {
  return new URL(path.replace(/^\//, ""), document.baseURI.replace(/[?#].*$/, "")).href;
}

export interface Options {
  body?: unknown;
  signal?: AbortSignal | undefined;
  headers?: Record<string, string>;
}

/** An answer whose status is good. Throws ApiFailure with the server's own words. */
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
    });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    throw new ApiFailure("Cannot reach the server.", 0);
  }
  if (response.ok) return response;
  if (response.status === 401) keyWanted.value = true;
  throw await failure(response);
}

async function failure(response: Response): Promise<ApiFailure> {
  const text = await response.text().catch(() => "");
  try {
    const said = JSON.parse(text) as { error?: { message?: string; type?: string } | string; message?: string };
    const error = said.error ?? { message: said.message ?? text.slice(0, 300) };
    if (typeof error === "string") return new ApiFailure(error, response.status);
    return new ApiFailure(error.message ?? text, response.status, error.type);
  } catch {
    return new ApiFailure(text.slice(0, 300) || response.statusText, response.status);
  }
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await (await send("GET", path, { signal })).json()) as T;
}

/** Passes on what is read; a failure to read becomes an ApiFailure. */
async function* connected<T>(given: AsyncGenerator<T>, signal?: AbortSignal): AsyncGenerator<T> {
  try {
    yield* given;
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiFailure("The connection to the server was lost.", 0);
  }
}

export async function postJson<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  return (await (await send("POST", path, { body, signal })).json()) as T;
}

/**
 * The events of a stream, each one's data as parsed JSON, until it ends or `signal` aborts it. Throws ApiFailure, also when
 * the connection is lost.
 */
export async function* stream(method: string, path: string, options: Options = {}): AsyncGenerator<unknown> {
  const response = await send(method, path, options);
  if (!response.body) return;
  for await (const event of connected(events(response.body), options.signal)) {
    if (event.data === "[DONE]") return;
    const data: unknown = JSON.parse(event.data);
    if (typeof data === "object" && data !== null && "error" in data) {
      const error = (data as { error: { message?: string; code?: number; type?: string } }).error;
      throw new ApiFailure(error.message ?? "the server ended the answer by an error", error.code ?? 500, error.type);
    }
    yield data;
  }
}
