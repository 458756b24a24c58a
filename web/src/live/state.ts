// State of the live view, from the events of `GET /live/events`: the whole state first, then changes.

export interface Slot {
  id: number;
  n_ctx: number;
  busy: boolean;
  task: number;
  /** Tokens in the slot's KV cells. */
  used: number;
  /** Tokens of its prompt; of those, found in the cache and computed so far. */
  prompt: number;
  cached: number;
  computed: number;
  predicted: number;
  /** Tokens it may still generate; -1 without a limit. */
  left: number;
}

/** A request. Durations are in seconds since its arrival. */
export interface LiveRequest {
  number: number;
  id: string;
  at: number;
  path: string;
  client: string;
  started: number | null;
  first?: number | null;
  prompt?: number;
  predicted?: number;
  /** Slots of a running request. */
  slots?: number[];
  /** Set once the request has finished. */
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

/** Fields that each event replaces. */
interface CurrentState {
  model: string;
  asleep: boolean;
  waiting: number;
  slots: Slot[];
  running: LiveRequest[];
  cells: { used: number; total: number; shared: number };
  cache: Cache;
  /** Requests since the server started; `cancelled`: the client disconnected. */
  counts: { ended: number; errors: number; cancelled: number };
  /** Of a router. */
  models: RoutedModel[];
}

/** One event. */
export interface Update extends Partial<CurrentState> {
  first?: boolean;
  at: number;
  samples?: Samples;
  ended?: LiveRequest[];
  log?: LogLine[];
}

export interface LiveState extends Partial<CurrentState> {
  /** Server clock minus browser clock, in seconds. */
  ahead: number;
  samples: Samples;
  ended: LiveRequest[];
  log: LogLine[];
  rates: Map<number, SlotRate>;
}

const MAX_SAMPLES = 3600;
const MAX_ENDED = 100;
const MAX_LINES = 2000;
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

/** Generation speed of a slot over the last seconds. */
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

function append<T>(old: T[], more: T[] | undefined, most: number): T[] {
  return more ? [...old, ...more].slice(-most) : old;
}

/** Return the state after an event. `now`: browser clock, in seconds. */
export function applyUpdate(before: LiveState | null, update: Update, now: number): LiveState {
  const { first, at, samples, ended, log, ...present } = update;
  const old = first ? null : before;
  const oldSamples = old?.samples ?? NO_SAMPLES;
  const found: LiveState = {
    ...old,
    ...present,
    ahead: at - now,
    samples: samples
      ? (Object.fromEntries(
          Object.entries(oldSamples).map(([name, values]) => [
            name,
            append<number | null>(values as (number | null)[], samples[name as keyof Samples], MAX_SAMPLES),
          ]),
        ) as unknown as Samples)
      : oldSamples,
    ended: append(old?.ended ?? [], ended, MAX_ENDED),
    log: append(old?.log ?? [], log, MAX_LINES),
    rates: old?.rates ?? new Map<number, SlotRate>(),
  };
  found.rates = new Map((found.slots ?? []).map((slot) => [slot.id, rate(found.rates.get(slot.id), slot, at)]));
  return found;
}

export type Phase = "queue" | "prompt" | "generation";

/** Return the phases of a request that lasted `length` seconds, in seconds since its arrival. */
export function phases(request: LiveRequest, length: number): { phase: Phase; from: number; to: number }[] {
  const started = request.started ?? (request.first != null || request.seconds === undefined ? null : length);
  const first = request.first ?? null;
  const queueEnd = Math.min(started ?? (first === null ? length : 0), length);
  const promptEnd = Math.min(first ?? length, length);
  const parts: { phase: Phase; from: number; to: number }[] = [
    { phase: "queue", from: 0, to: queueEnd },
    { phase: "prompt", from: queueEnd, to: promptEnd },
    { phase: "generation", from: promptEnd, to: length },
  ];
  return parts.filter((part) => part.to > part.from);
}

const LEVELS = ["debug", "info", "warning", "error", "critical"];

/** Return the level of a line; lines of a model's process contain it in their text. */
export function levelOf(line: LogLine): string {
  const printed = line.model ? /\b(debug|warning|error|critical): /.exec(line.text.slice(0, 100))?.[1] : undefined;
  return printed ?? line.level;
}

/** Return the lines of at least a level that contain a text, of one model or of all (""). */
export function filterLines(lines: LogLine[], level: string, text: string, model = ""): LogLine[] {
  const least = LEVELS.indexOf(level);
  const query = text.trim().toLowerCase();
  return lines.filter(
    (line) =>
      LEVELS.indexOf(levelOf(line)) >= least &&
      (!model || line.model === model) &&
      (!query || line.text.toLowerCase().includes(query) || line.request?.includes(query) === true),
  );
}
