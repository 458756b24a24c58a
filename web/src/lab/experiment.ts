// The experiment: repeat one greedy prompt, measure tokens/s, and compare the bytes of the answers.
import { computed, effect, signal } from "@preact/signals";
import { postJson, stream } from "../api/http";
import { partsOf } from "../cluster/layout";
import type { LabBody, LabLink, LayoutPrediction } from "../api/schema";
import { cluster, currentLayout } from "../cluster/state";
import { props } from "../api/server";
import { labels } from "../text";
import { secondsOnLinks, predictedComputing, expectedRate } from "./theory";

export interface Run {
  /** Seconds of a token on links, by the formula. */
  link: number;
  /** Tokens per second, measured and by the formula; `expected` is null without a compute time. */
  rate: number;
  expected: number | null;
  same: boolean;
}

export const PROMPT = "The longest rivers of Spain, in order, are";
const TOKENS = 16;
const MAX_RUNS = 200;
const PAUSE_MS = 700;

export const links = signal<LabLink[]>([]);
/** True if the server was started with --lab; null if unknown. */
export const isLabOn = signal<boolean | null>(null);
export const runs = signal<Run[]>([]);
/** Tokens of the current run. */
export const partialTokens = signal(0);
/** Seconds of a token without delays, by layout: the smallest measured value, and the server's prediction. */
const measured = signal<Record<string, number>>({});
const predicted = signal<Record<string, number | null>>({});
/** Key of the present layout in `measured` and `predicted`. */
const layoutKey = computed(() => (cluster.value ? JSON.stringify(partsOf(currentLayout.value)) : ""));
/** Seconds of a token without delays; null if unknown. */
export const computing = computed(() => measured.value[layoutKey.value] ?? predicted.value[layoutKey.value] ?? null);
/** True if `computing` was measured. */
export const isMeasured = computed(() => layoutKey.value in measured.value);
export const errorText = signal("");
/** The first answer, to which all others are compared. */
export const firstAnswer = signal<string | null>(null);

/** Return the seconds of a token on links, by the present settings. */
export function linkSeconds(): number {
  return secondsOnLinks(links.value, cluster.value?.devices ?? []);
}

let isPredicting = false; // the server may measure speeds, which pauses answers

/** Load the predicted compute time, so that there is a theory before the first run without delays. */
async function predictComputing(key: string): Promise<void> {
  predicted.value = { ...predicted.value, [key]: null }; // requested once
  isPredicting = true;
  try {
    const prediction = await postJson<LayoutPrediction>("cluster/predict", { devices: JSON.parse(key) as unknown });
    predicted.value = { ...predicted.value, [key]: predictedComputing(prediction) };
  } catch {
    // A worker is gone, or the model is not split: a run without delays will measure the time.
  } finally {
    isPredicting = false;
  }
}

async function run(stop: AbortSignal): Promise<void> {
  const [began, key] = [linkSeconds(), layoutKey.value];
  const times: number[] = [];
  let text = "";
  partialTokens.value = 0;
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
    partialTokens.value = times.length;
  }
  firstAnswer.value ??= text;
  const link = linkSeconds();
  const same = text === firstAnswer.value;
  if (times.length < 2) throw new Error(labels.value.lab.noTokens);
  const seconds = (times[times.length - 1]! - times[0]!) / 1e3 / (times.length - 1);
  const moved = link !== began || key !== layoutKey.value;
  if (!moved && link === 0) measured.value = { ...measured.value, [key]: Math.min(measured.value[key] ?? Infinity, seconds) };
  if (moved) {
    if (!same) runs.value = [...runs.value, { link, rate: 1 / seconds, expected: null, same }];
    return; // a part of it ran with other settings
  }
  const expected = expectedRate(computing.value, link);
  runs.value = [...runs.value, { link, rate: 1 / seconds, expected, same }].slice(-MAX_RUNS);
  errorText.value = "";
}

/** Repeat the experiment until the returned function is called. */
export function startExperiment(): () => void {
  const stop = new AbortController();
  const unfollow = effect(() => {
    const key = layoutKey.value;
    const unknown = isLabOn.value && key && computing.value === null && linkSeconds() > 0;
    if (unknown && !(key in predicted.peek())) void predictComputing(key);
  });
  void (async () => {
    while (!stop.signal.aborted) {
      try {
        if (isLabOn.value && cluster.value && !document.hidden && !isPredicting) await run(stop.signal);
        else await new Promise((resolve) => setTimeout(resolve, 100));
      } catch (error) {
        if (stop.signal.aborted) return;
        errorText.value = error instanceof Error ? error.message : String(error);
        await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      }
    }
  })();
  return () => {
    unfollow();
    stop.abort();
  };
}

export function setLab(state: LabBody): void {
  isLabOn.value = state.on;
  links.value = state.links;
}

export async function changeLab(path: string, body: unknown): Promise<void> {
  try {
    setLab(await postJson<LabBody>(path, body));
    errorText.value = "";
  } catch (error) {
    errorText.value = error instanceof Error ? error.message : String(error);
  }
}

let timer: ReturnType<typeof setTimeout> | undefined;

/** Change a link. The request is sent once the slider rests. */
export function setLink(endpoint: string, change: Partial<LabLink>): void {
  links.value = links.value.map((one) => (one.endpoint === endpoint ? { ...one, ...change } : one));
  clearTimeout(timer);
  timer = setTimeout(() => void changeLab("lab/links", { links: links.value }), 120);
}
