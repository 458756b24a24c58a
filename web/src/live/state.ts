// What `GET /live/events` tells: first all there is, then what has changed of it.

export interface Slot {
  id: number;
  n_ctx: number;
  busy: boolean;
  task: number;
  /** Tokens in its cells. */
  used: number;
  /** Tokens of its prompt; of those, found in the cache and computed so far. */
  prompt: number;
  cached: number;
  computed: number;
  predicted: number;
  /** -1: without a limit. */
  left: number;
}

/** A request; what is seconds counts from its arrival. */
export interface Asked {
  number: number;
  id: string;
  at: number;
  path: string;
  client: string;
  started: number | null;
  first?: number | null;
  prompt?: number;
  predicted?: number;
  /** Of one that is answered now. */
  slots?: number[];
  /** Of one whose answer is over. */
  seconds?: number;
  model?: string;
  status?: number;
  cached?: number;
  rate?: number;
  stop?: string;
  reason?: string;
}

export interface Samples {
  at: number[];
  prompt: number[];
  answer: number[];
  running: number[];
  waiting: number[];
  cells: number[];
  first_token: (number | null)[];
  errors: number[];
}

export interface Cache {
  prompts: number;
  tokens: number;
  bytes: number;
  hit_tokens: number;
  computed_tokens: number;
  disk?: { files: number; bytes: number; hits: number; tokens_read: number };
}

export interface LogLine {
  at: number;
  level: string;
  text: string;
  model?: string;
  request?: string;
}

export interface RoutedModel {
  id: string;
  name: string;
  state: string;
  requests: number;
  waiting: number;
  restarts: number;
  pid: number | null;
  progress?: number;
  failure?: string;
}

/** What is as it is now. */
interface Present {
  model: string;
  asleep: boolean;
  waiting: number;
  slots: Slot[];
  running: Asked[];
  cells: { used: number; total: number; shared: number };
  cache: Cache;
  /** Requests since the server's start; cancelled: their clients left. */
  counts: { ended: number; errors: number; cancelled: number };
  /** Of a router. */
  models: RoutedModel[];
}

/** One event. */
export interface Update extends Partial<Present> {
  first?: boolean;
  at: number;
  samples?: Samples;
  ended?: Asked[];
  log?: LogLine[];
}

export interface Known extends Partial<Present> {
  /** The server's clock against this one's, in seconds. */
  ahead: number;
  samples: Samples;
  ended: Asked[];
  log: LogLine[];
  rates: Map<number, SlotRate>;
}

const MOST_SAMPLES = 3600;
const MOST_ENDED = 100;
const MOST_LINES = 2000;
const RATE_SECONDS = 2;

const NO_SAMPLES: Samples = {
  at: [],
  prompt: [],
  answer: [],
  running: [],
  waiting: [],
  cells: [],
  first_token: [],
  errors: [],
};

/** How fast a slot answers, by what came in the last seconds. */
export interface SlotRate {
  task: number;
  points: [at: number, predicted: number][];
  perSecond: number;
}

function rate(before: SlotRate | undefined, slot: Slot, at: number): SlotRate {
  const points = before?.task === slot.task && slot.busy ? before.points.filter(([t]) => t > at - RATE_SECONDS) : [];
  points.push([at, slot.predicted]);
  const [from, n] = points[0]!;
  return { task: slot.task, points, perSecond: at > from ? (slot.predicted - n) / (at - from) : 0 };
}

function joined<T>(old: T[], more: T[] | undefined, most: number): T[] {
  return more ? [...old, ...more].slice(-most) : old;
}

/** What is known after an event. `now`: seconds of this browser's clock. */
export function merged(before: Known | null, update: Update, now: number): Known {
  const { first, at, samples, ended, log, ...present } = update;
  const old = first ? null : before;
  const olds = old?.samples ?? NO_SAMPLES;
  const found: Known = {
    ...old,
    ...present,
    ahead: at - now,
    samples: samples
      ? (Object.fromEntries(
          Object.entries(olds).map(([name, values]) => [
            name,
            joined<number | null>(values as (number | null)[], samples[name as keyof Samples], MOST_SAMPLES),
          ]),
        ) as unknown as Samples)
      : olds,
    ended: joined(old?.ended ?? [], ended, MOST_ENDED),
    log: joined(old?.log ?? [], log, MOST_LINES),
    rates: old?.rates ?? new Map<number, SlotRate>(),
  };
  found.rates = new Map((found.slots ?? []).map((slot) => [slot.id, rate(found.rates.get(slot.id), slot, at)]));
  return found;
}

export type Phase = "queue" | "prompt" | "answer";

/** How a request's time was spent, in seconds from its arrival: parts that follow each other. `length`: of it all. */
export function phases(asked: Asked, length: number): { phase: Phase; from: number; to: number }[] {
  const started = asked.started ?? (asked.first != null || asked.seconds === undefined ? null : length);
  const first = asked.first ?? null;
  const queueEnd = Math.min(started ?? (first === null ? length : 0), length);
  const promptEnd = Math.min(first ?? length, length);
  const parts: { phase: Phase; from: number; to: number }[] = [
    { phase: "queue", from: 0, to: queueEnd },
    { phase: "prompt", from: queueEnd, to: promptEnd },
    { phase: "answer", from: promptEnd, to: length },
  ];
  return parts.filter((part) => part.to > part.from);
}

const LEVELS = ["debug", "info", "warning", "error", "critical"];

/** A line's level; what a model's process prints says it in its text. */
export function levelOf(line: LogLine): string {
  const said = line.model ? /\b(debug|warning|error|critical): /.exec(line.text.slice(0, 100))?.[1] : undefined;
  return said ?? line.level;
}

/** The lines of at least a level, with a text in them, of one model or of all (""). */
export function filtered(lines: LogLine[], level: string, text: string, model = ""): LogLine[] {
  const least = LEVELS.indexOf(level);
  const wanted = text.trim().toLowerCase();
  return lines.filter(
    (line) =>
      LEVELS.indexOf(levelOf(line)) >= least &&
      (!model || line.model === model) &&
      (!wanted || line.text.toLowerCase().includes(wanted) || line.request?.includes(wanted) === true),
  );
}
