// What is known of the server: whether it answers, what it serves, its settings.
import { computed, effect, signal } from "@preact/signals";
import { ApiFailure, apiKey, getJson } from "./http";

export interface Props {
  model_alias?: string;
  model_path?: string;
  total_slots?: number;
  build_info?: string;
  role?: string;
  chat_template?: string;
  chat_template_caps?: Record<string, unknown>;
  modalities?: Record<string, boolean>;
  /** Whether /tools is there, and /cors-proxy. */
  tools_enabled?: boolean;
  cors_proxy_enabled?: boolean;
  endpoint_slots?: boolean;
  endpoint_metrics?: boolean;
  default_generation_settings?: { n_ctx?: number; params?: Record<string, unknown> };
  ui_settings?: Record<string, unknown>;
}

export interface ModelEntry {
  id: string;
  /** Of a router's models: loaded, loading, unloaded, … */
  status?: { value: string };
}

export type Health =
  | { state: "ready" }
  | { state: "loading"; stage: string; progress: number }
  | { state: "fault"; why: string }
  | { state: "unreachable" };

export const health = signal<Health>({ state: "loading", stage: "", progress: 0 });
export const props = signal<Props>({});
export const models = signal<ModelEntry[]>([]);
/** Whether many models are behind this address (a router). */
export const isRouter = computed(() => props.value.role === "router");

/** Whether the server has said what it is. */
export const isKnown = computed(() => Object.keys(props.value).length > 0);

/**
 * The model that a request names: of a router's the one that was chosen, or else one that is loaded, or the first; "" where
 * there is only one.
 */
export function modelFor(chosen: string): string {
  const all = models.value;
  if (!isRouter.value && all.length < 2) return "";
  const found = all.find((one) => one.id === chosen) ?? all.find((one) => one.status?.value === "loaded") ?? all[0];
  return found?.id ?? chosen;
}

/** What a server writes conversations in where a model has no template of its own (`CHATML` of the server's). */
const CHATML =
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/** Whether the model has no template of its own: it was not made for conversations, and may never end an answer. */
export const onlyGoesOn = computed(() => props.value.chat_template === CHATML);

const READY_MS = 5000;
const WAITING_MS = 700;

async function readHealth(): Promise<Health> {
  let response: Response;
  try {
    response = await fetch(new URL("health", document.baseURI));
  } catch {
    return { state: "unreachable" };
  }
  if (response.ok) return { state: "ready" };
  try {
    const body = (await response.json()) as { error?: { message?: string }; stage?: string; progress?: number };
    if (body.stage !== undefined) return { state: "loading", stage: body.stage, progress: body.progress ?? 0 };
    return { state: "fault", why: body.error?.message ?? response.statusText };
  } catch {
    return { state: "fault", why: response.statusText };
  }
}

/** Reads settings and models anew; without a key that is wanted, nothing. */
export async function refresh(): Promise<void> {
  try {
    const [found, listed] = await Promise.all([getJson<Props>("props"), getJson<{ data: ModelEntry[] }>("v1/models")]);
    props.value = found;
    models.value = listed.data;
  } catch (error) {
    if (!(error instanceof ApiFailure)) throw error;
  }
}

/** Asks the server for its state now; when it has become ready, also for what it serves. */
export async function checkHealth(): Promise<void> {
  const now = await readHealth();
  const before = health.value;
  if (JSON.stringify(now) !== JSON.stringify(before)) health.value = now;
  if (now.state === "ready" && before.state !== "ready") await refresh();
}

async function watch(): Promise<void> {
  await checkHealth();
  setTimeout(() => void watch(), health.value.state === "ready" ? READY_MS : WAITING_MS);
}

/** Begins to watch the server; called once. */
export function start(): void {
  void watch();
  let key = apiKey.value;
  effect(() => {
    if (apiKey.value !== key) {
      key = apiKey.value;
      void refresh();
    }
  });
}
