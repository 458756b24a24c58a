// Streams of answers that the server keeps while no page reads them. Each request has one, with an id of its own.
import { ApiFailure, postJson, send, stream } from "../api/http";

const HEADER = "X-Conversation-Id";
const PATH = "v1/stream";
/** Pauses before attempts to reach the server again; the attempts count from the last event. */
const PAUSES_MS = [0, 1000, 2000, 4000, 8000];
const START_MS = 1000;
/** Statuses of a server without kept streams. */
const NO_ROUTE = [404, 405, 501];

export interface KeptStream {
  id: string;
  /** The bytes of it that were read. */
  read: number;
}

/** The server cannot be reached, but may still have the stream. */
export class StreamOutOfReach extends ApiFailure {}

/** False once the server has turned out to keep no streams. */
let hasStreams = true;

/**
 * Yield the events of a stream that were not read yet. With `body` the stream begins with its request. After a lost
 * connection, go on with what the server has kept. Returns early if the server no longer has the stream; throws
 * StreamOutOfReach if it cannot be reached again, and other ApiFailures.
 */
export async function* keptStream(kept: KeptStream, signal: AbortSignal, body?: unknown): AsyncGenerator<unknown> {
  let loss: ApiFailure | undefined;
  let isRequested = body === undefined;
  let missed = 0; // lookups in a row without the stream
  for (let attempt = 0; ; await sleep(PAUSES_MS[attempt]!, signal)) {
    const start = kept.read;
    const options = { signal, onEvent: (end: number) => (kept.read = start + end) };
    try {
      if (!isRequested) {
        isRequested = true;
        return yield* stream("POST", "v1/chat/completions", { ...options, body, headers: { [HEADER]: kept.id } });
      }
      const state = await waitForStart(kept.id, signal);
      missed = state ? 0 : missed + 1;
      if (state?.is_done && state.total_bytes <= start) return; // its writer failed, and nothing follows
      if (state) return yield* stream("GET", `${address(kept.id)}&from=${start}`, options);
    } catch (error) {
      const isPost = loss === undefined && body !== undefined;
      if (signal.aborted || !(error instanceof ApiFailure) || !isLoss(error, isPost)) throw error;
      loss = error;
    }
    if (missed > 1 || !hasStreams) {
      if (loss) throw loss;
      return;
    }
    attempt = kept.read > start ? 0 : attempt + 1;
    if (attempt >= PAUSES_MS.length) throw new StreamOutOfReach(loss?.message ?? "", 0);
  }
}

/** Return true if the server may have more of a stream although a request failed. */
function isLoss({ status, isEvent }: ApiFailure, isPost: boolean): boolean {
  if (isEvent) return false;
  // 503: the server has rejected the request, or the owner of the stream is loading. 404: it was there at the lookup.
  return [0, 502, 504, ...(isPost ? [] : [404, 503])].includes(status);
}

interface StreamState {
  conversation_id: string;
  is_done: boolean;
  total_bytes: number;
}

/** Return the state of a stream once it has bytes, which takes as long as a router loads its model; nothing if it is gone. */
async function waitForStart(id: string, signal: AbortSignal): Promise<StreamState | undefined> {
  for (;;) {
    const state = await lookUp(id, signal);
    if (!state || state.is_done || state.total_bytes > 0) return state;
    await sleep(START_MS, signal);
  }
}

/** Return the state of a stream; nothing if the server does not have it. Throws ApiFailure. */
async function lookUp(id: string, signal: AbortSignal): Promise<StreamState | undefined> {
  if (!hasStreams) return undefined;
  try {
    const found = await postJson<StreamState[]>("v1/streams/lookup", { conversation_ids: [id] }, signal);
    return found.find((one) => one.conversation_id === id);
  } catch (error) {
    if (signal.aborted) throw error;
    if (isUnsupported(error)) return undefined;
    const { message, status = 0 } = error as ApiFailure;
    // Without a valid key the answer waits until the user enters one. Other failures pass.
    throw status === 401 ? new StreamOutOfReach(message, status) : new ApiFailure(message, 0);
  }
}

/** Return true if a response shows that the server keeps no streams. Such a server gets no further requests for them. */
function isUnsupported(error: unknown): boolean {
  const isMissing = error instanceof ApiFailure ? NO_ROUTE.includes(error.status) : error instanceof SyntaxError; // no JSON
  if (isMissing) hasStreams = false;
  return isMissing;
}

/** Stop the generation of a stream. Return false if that failed. */
export async function stopStream(id: string): Promise<boolean> {
  if (!hasStreams) return true;
  try {
    await send("DELETE", address(id), { keepalive: true });
    return true;
  } catch (error) {
    return isUnsupported(error);
  }
}

function address(id: string): string {
  return `${PATH}?conv_id=${encodeURIComponent(id)}`;
}

function sleep(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = () => (clearTimeout(timer), reject(signal.reason as Error));
    const timer = setTimeout(() => (signal.removeEventListener("abort", stop), resolve()), milliseconds);
    if (signal.aborted) stop();
    else signal.addEventListener("abort", stop, { once: true });
  });
}
