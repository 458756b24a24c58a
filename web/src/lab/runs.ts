// The experiment: the same greedy prompt again and again, how fast its answers come, and whether they are the same bytes.
import { signal } from "@preact/signals";
import { postJson, stream } from "../api/http";
import { cluster } from "../cluster/state";
import { props } from "../api/server";
import { secondsOnLinks, theory } from "./theory";

export interface LabLink {
  endpoint: string;
  worker: string;
  latency_ms: number;
  jitter_ms: number;
  /** Bits per second; null: no limit. */
  bandwidth: number | null;
  own: boolean;
  running: boolean;
}

export interface Run {
  /** Seconds that links should cost a token. */
  link: number;
  /** Tokens per second, measured and by the formula; the latter is null while computing alone was not measured. */
  rate: number;
  expected: number | null;
  same: boolean;
}

export const PROMPT = "The longest rivers of Spain, in order, are";
const TOKENS = 16;
const MOST_RUNS = 200;
const PAUSE_MS = 700;

export const links = signal<LabLink[]>([]);
/** Whether the server was started with --lab; null: not known yet. */
export const on = signal<boolean | null>(null);
export const runs = signal<Run[]>([]);
/** Tokens of the run that goes on. */
export const partial = signal(0);
/** Seconds of a token without delays, the least of those that were measured. */
export const computing = signal<number | null>(null);
export const trouble = signal("");
/** The first answer, that all others are compared with. */
export const first = signal<string | null>(null);

/** Seconds that the links cost a token by their settings. */
export function linkSeconds(): number {
  return secondsOnLinks(links.value, cluster.value?.devices ?? []);
}

async function run(stop: AbortSignal): Promise<void> {
  const began = linkSeconds();
  const times: number[] = [];
  let text = "";
  partial.value = 0;
  const body = {
    prompt: PROMPT,
    n_predict: TOKENS,
    temperature: 0,
    ignore_eos: true,
    cache_prompt: false,
    stream: true,
    id_slot: Math.max(0, (props.value.total_slots ?? 1) - 1),
  };
  for await (const event of stream("POST", "completion", { body, signal: stop })) {
    const { content = "", tokens = [] } = event as { content?: string; tokens?: number[] };
    text += content;
    if (tokens.length) times.push(performance.now());
    partial.value = times.length;
  }
  first.value ??= text;
  const link = linkSeconds();
  const same = text === first.value;
  if (times.length < 2) throw new Error("the answer has no tokens");
  const seconds = (times[times.length - 1]! - times[0]!) / 1e3 / (times.length - 1);
  if (link === 0 && began === 0) computing.value = Math.min(computing.value ?? Infinity, seconds);
  if (link !== began) {
    if (!same) runs.value = [...runs.value, { link, rate: 1 / seconds, expected: null, same }];
    return; // half of it was another network's
  }
  const expected = theory(computing.value, link);
  runs.value = [...runs.value, { link, rate: 1 / seconds, expected, same }].slice(-MOST_RUNS);
  trouble.value = "";
}

/** Runs the experiment until the returned function is called. */
export function begin(): () => void {
  const stop = new AbortController();
  void (async () => {
    while (!stop.signal.aborted) {
      try {
        if (on.value && cluster.value && !document.hidden) await run(stop.signal);
        else await new Promise((resolve) => setTimeout(resolve, 100));
      } catch (error) {
        if (stop.signal.aborted) return;
        trouble.value = error instanceof Error ? error.message : String(error);
        await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      }
    }
  })();
  return () => stop.abort();
}

type Answer = { on: boolean; links: LabLink[] };

export function take(answer: Answer): void {
  on.value = answer.on;
  links.value = answer.links;
}

export async function act(path: string, body: unknown): Promise<void> {
  try {
    take(await postJson<Answer>(path, body));
    trouble.value = "";
  } catch (error) {
    trouble.value = error instanceof Error ? error.message : String(error);
  }
}

let wanted: ReturnType<typeof setTimeout> | undefined;

/** Sets a link; the server hears of it when the slider rests for a moment. */
export function setLink(endpoint: string, change: Partial<LabLink>): void {
  links.value = links.value.map((one) => (one.endpoint === endpoint ? { ...one, ...change } : one));
  clearTimeout(wanted);
  wanted = setTimeout(() => void act("lab/links", { links: links.value }), 120);
}
