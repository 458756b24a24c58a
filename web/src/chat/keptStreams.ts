// Streams of answers that the server keeps while no page reads them. Each answer has one, named by the id of its message.
import { ApiFailure, postJson, send, stream } from "../api/http";

const HEADER = "X-Conversation-Id";
const PATH = "v1/stream";
/** Pauses before attempts to reach the server again after the connection was lost. */
const PAUSES_MS = [0, 1000, 2000, 4000, 8000];
const START_MS = 1000;

interface Options {
  signal: AbortSignal;
  /** The bytes of the stream that were read. */
  offset: { read: number };
}

function address(id: string): string {
  return `${PATH}?conv_id=${encodeURIComponent(id)}`;
}

/** Request an answer and yield its events; if the connection is lost, go on with the stream that the server keeps. */
export async function* keptStream(id: string, body: unknown, options: Options): AsyncGenerator<unknown> {
  const onEvent = (end: number) => (options.offset.read = end);
  try {
    yield* stream("POST", "v1/chat/completions", { body, signal: options.signal, headers: { [HEADER]: id }, onEvent });
  } catch (error) {
    yield* afterLoss(error, id, options);
  }
}

/** Yield the events of a kept stream that were not read yet. */
export async function* restOfStream(id: string, options: Options): AsyncGenerator<unknown> {
  const { signal, offset } = options;
  const start = offset.read;
  if (!(await waitForStart(id, signal))) return;
  try {
    yield* stream("GET", `${address(id)}&from=${start}`, { signal, onEvent: (end) => (offset.read = start + end) });
  } catch (error) {
    yield* afterLoss(error, id, options);
  }
}

/** Go on with a stream after an error if the connection was lost and the server has the stream. Throws the error if not. */
async function* afterLoss(error: unknown, id: string, options: Options): AsyncGenerator<unknown> {
  if (!(error instanceof ApiFailure) || error.status !== 0) throw error;
  // If nothing was read, the server may never have had the request.
  for (const pause of options.offset.read ? PAUSES_MS : PAUSES_MS.slice(0, 3)) {
    await sleep(pause, options.signal);
    try {
      if ((await findStreams([id], options.signal)).has(id)) return yield* restOfStream(id, options);
      break;
    } catch (failure) {
      if (!(failure instanceof ApiFailure) || failure.status !== 0) throw options.signal.aborted ? failure : error;
    }
  }
  throw error;
}

interface StreamState {
  conversation_id: string;
  is_done: boolean;
  total_bytes: number;
}

async function lookUp(ids: string[], signal?: AbortSignal): Promise<StreamState[]> {
  return postJson<StreamState[]>("v1/streams/lookup", { conversation_ids: ids }, signal);
}

/** Return those ids whose streams the server has. Throws ApiFailure. */
export async function findStreams(ids: string[], signal?: AbortSignal): Promise<Set<string>> {
  return new Set((await lookUp(ids, signal)).map((one) => one.conversation_id));
}

/** Wait until a stream has bytes: a router may still load its model. Return false if it is gone. */
async function waitForStart(id: string, signal: AbortSignal): Promise<boolean> {
  for (;;) {
    const state = (await lookUp([id], signal)).find((one) => one.conversation_id === id);
    if (!state || state.is_done || state.total_bytes > 0) return state !== undefined;
    await sleep(START_MS, signal);
  }
}

/** Stop the generation of a stream. */
export async function stopStream(id: string): Promise<void> {
  await send("DELETE", address(id)).catch(() => undefined); // without the server nothing is generated
}

function sleep(milliseconds: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    const stop = () => (clearTimeout(timer), reject(signal.reason as Error));
    const timer = setTimeout(() => (signal.removeEventListener("abort", stop), resolve()), milliseconds);
    if (signal.aborted) stop();
    else signal.addEventListener("abort", stop, { once: true });
  });
}
