import { beforeEach, expect, test, vi } from "vitest";

vi.stubGlobal("localStorage", { getItem: () => null, setItem: () => undefined, removeItem: () => undefined });
vi.stubGlobal("document", { baseURI: "http://server/" });
vi.useFakeTimers();

type Respond = (method: string, path: string, body: string) => Response | Promise<Response>;

let respond: Respond;
let requests: string[];
vi.stubGlobal("fetch", async (url: string, { method, body }: RequestInit) => {
  const path = url.slice("http://server/".length);
  requests.push(`${method} ${path}`);
  return respond(method!, path, String(body));
});

let streams: typeof import("./keptStreams");
beforeEach(async () => {
  requests = [];
  vi.resetModules();
  streams = await import("./keptStreams");
});

const EVENT = `data: {"a": 1}\n\n`;
const BODY = {};

/** Return a response whose body is cut after `text`. */
function cut(text: string): Response {
  const bytes = new TextEncoder().encode(text);
  let isSent = !text;
  return new Response(new ReadableStream({ pull: (one) => (isSent ? one.error(new TypeError("cut")) : ((isSent = true), one.enqueue(bytes))) }));
}

function state(total_bytes: number, is_done = false): Response {
  return Response.json([{ conversation_id: "s", is_done, total_bytes }]);
}

/** Read a stream to its end while time passes. */
async function read(kept = { id: "s", read: 0 }, body?: object) {
  let n = 0;
  const all = (async () => {
    for await (const _ of streams.keptStream(kept, new AbortController().signal, body)) n++;
  })();
  const end = all.then(() => "end", (error: unknown) => error);
  await vi.advanceTimersByTimeAsync(60_000);
  return { end: await Promise.race([end, "open"]), n, read: kept.read };
}

test("a stream whose writer failed ends after its last byte", async () => {
  respond = (_, path) => (path.endsWith("lookup") ? state(2 * EVENT.length, true) : cut(EVENT));
  expect(await read(undefined, BODY)).toEqual({ end: "end", n: 2, read: 2 * EVENT.length });
  expect(requests).toHaveLength(4);
});

test("a stream that does not grow is read only after pauses, and stays open", async () => {
  respond = (_, path) => (path.endsWith("lookup") ? state(99) : cut(""));
  expect((await read({ id: "s", read: 5 })).end).toBeInstanceOf(streams.StreamOutOfReach);
  expect(requests.filter((one) => one.startsWith("GET"))).toEqual(Array(5).fill("GET v1/stream?conv_id=s&from=5"));
});

test("a long outage leaves a stream open", async () => {
  const down = [() => Promise.reject(new TypeError("refused")), () => new Response("", { status: 502 }), () => new Response("", { status: 500 })];
  let n = 0;
  respond = (method) => (method === "POST" && requests.length === 1 ? cut(EVENT) : down[n++ % 3]!());
  expect((await read(undefined, BODY)).end).toBeInstanceOf(streams.StreamOutOfReach);
});

test("a stream is gone after two lookups in a row without it", async () => {
  let lookups = 0;
  respond = (_, path) => (!path.endsWith("lookup") ? new Response(EVENT) : ++lookups === 1 ? Response.json([]) : state(EVENT.length));
  expect(await read()).toMatchObject({ end: "end", n: 1 });
  respond = () => Response.json([]);
  requests = [];
  expect(await read()).toMatchObject({ end: "end", n: 0 });
  expect(requests).toHaveLength(2);
});

test("errors of the server are not retried", async () => {
  const error = `data: {"error": {"message": "no", "code": 503}}\n\n`;
  for (const one of [() => new Response(error), () => new Response("no", { status: 503 }), () => new Response("no", { status: 400 })]) {
    requests = [];
    respond = one;
    const { end } = await read(undefined, BODY);
    expect(end).toMatchObject({ message: "no" });
    expect(end).not.toBeInstanceOf(streams.StreamOutOfReach);
    expect(requests).toHaveLength(1);
  }
});

test.each([() => new Response("no", { status: 404 }), () => new Response("<html>")])("a server without streams gets one lookup", async (missing) => {
  respond = missing;
  expect((await read()).end).toBe("end");
  expect((await read()).end).toBe("end");
  expect(await streams.stopStream("s")).toBe(true);
  expect(requests).toEqual(["POST v1/streams/lookup"]);
});

test("a stop that failed is reported", async () => {
  respond = () => Promise.reject(new TypeError("refused"));
  expect(await streams.stopStream("s")).toBe(false);
  respond = () => new Response(null, { status: 204 });
  expect(await streams.stopStream("s")).toBe(true);
});
