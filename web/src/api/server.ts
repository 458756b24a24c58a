// State of the server: health, models and settings.
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
  /** True if the server has /tools. */
  tools_enabled?: boolean;
  cors_proxy_enabled?: boolean;
  /** True if the server keeps the chats (--chats). */
  chats_kept?: boolean;
  endpoint_slots?: boolean;
  endpoint_metrics?: boolean;
  default_generation_settings?: { n_ctx?: number; params?: Record<string, unknown> };
  ui_settings?: Record<string, unknown>;
}

export interface ModelEntry {
  id: string;
  /** Load state of a router's model: loaded, loading, unloaded, … */
  status?: { value: string; progress?: { value?: number } };
  meta?: { n_params?: number; size?: number };
  architecture?: { input_modalities?: string[] };
}

/** Input that a model accepts besides text. */
export interface Modalities {
  image: boolean;
  audio: boolean;
}

export type Health =
  | { state: "ready" }
  | { state: "loading"; stage: string; progress: number; model: string }
  | { state: "fault"; why: string }
  | { state: "unreachable" };

export const health = signal<Health>({ state: "loading", stage: "", progress: 0, model: "" });
export const props = signal<Props>({});
export const models = signal<ModelEntry[]>([]);
/** True if this address is a router, which serves many models. */
export const isRouter = computed(() => props.value.role === "router");

/** True once the server's properties are loaded. */
export const isKnown = computed(() => Object.keys(props.value).length > 0);

/**
 * Return the model that requests name: the chosen one, else a loaded one, else the first; "" if the server has one model.
 */
export function modelFor(chosen: string): string {
  const all = models.value;
  if (!isRouter.value && all.length < 2) return "";
  const found = all.find((one) => one.id === chosen) ?? all.find((one) => one.status?.value === "loaded") ?? all[0];
  return found?.id ?? chosen;
}

/** Return the input that a model accepts. A router's model that is not loaded accepts any; the server rejects what it cannot use. */
export function modalitiesOf(model: string): Modalities {
  const { vision = false, audio = false } = props.value.modalities ?? {};
  if (!isRouter.value) return { image: vision, audio };
  const entry = models.value.find((one) => one.id === model);
  if (entry?.status?.value !== "loaded") return { image: true, audio: true };
  const accepted = entry.architecture?.input_modalities ?? [];
  return { image: accepted.includes("image"), audio: accepted.includes("audio") };
}

/** Return true if a request for a model does not have to load it first. */
export function isModelLoaded(model: string): boolean {
  return !isRouter.value || models.value.find((one) => one.id === model)?.status?.value === "loaded";
}

/** The server's fallback template for models without one (`CHATML` in Python). */
const CHATML =
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/** True if the model has no chat template: a base model, which may never end an answer. */
export const isBaseModel = computed(() => props.value.chat_template === CHATML);

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
    const body = (await response.json()) as { error?: { message?: string }; stage?: string; progress?: number; model?: string };
    if (body.stage !== undefined) return { state: "loading", stage: body.stage, progress: body.progress ?? 0, model: body.model ?? "" };
    return { state: "fault", why: body.error?.message ?? response.statusText };
  } catch {
    return { state: "fault", why: response.statusText };
  }
}

/** Load settings and models again. Does nothing if the server rejects the request, for example for lack of a key. */
export async function refreshProps(): Promise<void> {
  try {
    const [found, listed] = await Promise.all([getJson<Props>("props"), getJson<{ data: ModelEntry[] }>("v1/models")]);
    props.value = found;
    models.value = listed.data;
  } catch (error) {
    if (!(error instanceof ApiFailure)) throw error;
  }
}

/** Load the states of a router's models again: other clients load and unload them too. */
async function refreshModels(): Promise<void> {
  try {
    const { data } = await getJson<{ data: ModelEntry[] }>("v1/models");
    if (JSON.stringify(data) !== JSON.stringify(models.value)) models.value = data;
  } catch (error) {
    if (!(error instanceof ApiFailure)) throw error;
  }
}

/** Check the server's health, and load its settings and models once it is ready. */
export async function checkHealth(): Promise<void> {
  const now = await readHealth();
  const before = health.value;
  if (JSON.stringify(now) !== JSON.stringify(before)) health.value = now;
  if (now.state !== "ready") return;
  if (before.state !== "ready") await refreshProps();
  else if (isRouter.value && !document.hidden) await refreshModels();
}

async function poll(): Promise<void> {
  await checkHealth();
  setTimeout(() => void poll(), health.value.state === "ready" ? READY_MS : WAITING_MS);
}

/** Start polling the server. Called once. */
export function watchServer(): void {
  void poll();
  let key = apiKey.value;
  effect(() => {
    if (apiKey.value !== key) {
      key = apiKey.value;
      void refreshProps();
    }
  });
}
