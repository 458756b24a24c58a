// The experiment: the same greedy prompt again and again, how fast its answers come, and whether they are the same bytes.
import { computed, effect, signal } from "@preact/signals";
import { postJson, stream } from "../api/http";
import { partsOf } from "../cluster/layout";
import type { LayoutPrediction } from "../cluster/schema";
import { cluster, now } from "../cluster/state";
import { props } from "../api/server";
import { type LabLink, secondsOnLinks, secondsReckoned, theory } from "./theory";

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
/** Seconds of a token without delays by where the layers are: the least that was measured, and what the server reckons. */
const measured = signal<Record<string, number>>({});
const reckoned = signal<Record<string, number | null>>({});
/** Which layers are where, as a key of the two. */
const placed = computed(() => (cluster.value ? JSON.stringify(partsOf(now.value)) : ""));
/** Seconds of a token without delays; null: nobody knows yet. */
export const computing = computed(() => measured.value[placed.value] ?? reckoned.value[placed.value] ?? null);
/** Whether that was measured. */
export const isMeasured = computed(() => placed.value in measured.value);
export const trouble = signal("");
/** The first answer, that all others are compared with. */
export const first = signal<string | null>(null);

/** Seconds that the links cost a token by their settings. */
export function linkSeconds(): number {
  return secondsOnLinks(links.value, cluster.value?.devices ?? []);
}

let reckoning = false; // it may have speeds measured, for which answers wait

/** Asks what a token takes by the server's arithmetic, so that there is a theory before a run without delays. */
async function reckon(place: string): Promise<void> {
  reckoned.value = { ...reckoned.value, [place]: null }; // asked once
  reckoning = true;
  try {
    const told = await postJson<LayoutPrediction>("cluster/predict", { devices: JSON.parse(place) as unknown });
    reckoned.value = { ...reckoned.value, [place]: secondsReckoned(told) };
  } catch {
    // A worker is gone, or the model is here alone: a run without delays will tell.
  } finally {
    reckoning = false;
  }
}

async function run(stop: AbortSignal): Promise<void> {
  const [began, place] = [linkSeconds(), placed.value];
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
  const moved = link !== began || place !== placed.value;
  if (!moved && link === 0) measured.value = { ...measured.value, [place]: Math.min(measured.value[place] ?? Infinity, seconds) };
  if (moved) {
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
  const unfollow = effect(() => {
    const place = placed.value;
    const unknown = on.value && place && computing.value === null && linkSeconds() > 0;
    if (unknown && !(place in reckoned.peek())) void reckon(place);
  });
  void (async () => {
    while (!stop.signal.aborted) {
      try {
        if (on.value && cluster.value && !document.hidden && !reckoning) await run(stop.signal);
        else await new Promise((resolve) => setTimeout(resolve, 100));
      } catch (error) {
        if (stop.signal.aborted) return;
        trouble.value = error instanceof Error ? error.message : String(error);
        await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      }
    }
  })();
  return () => {
    unfollow();
    stop.abort();
  };
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
