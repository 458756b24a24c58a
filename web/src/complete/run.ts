// State of the complete and infill views.
import { signal } from "@preact/signals";
import { ApiFailure } from "../api/http";
import { explain } from "../api/problems";
import { NO_SETTINGS, type Settings } from "../chat/settings";
import { FrameScheduler } from "../ui/frames";
import { persistentSignal } from "../ui/persistent";
import { nativeFields, type Continuation, requestContinuation } from "./request";

const TOKENS = 128; // a model that never ends would fill its context

/** Settings of both views. */
export const settings = persistentSignal<Settings>("complete", { ...NO_SETTINGS, parameters: { n_predict: TOKENS } });

export function changeSettings(changes: Partial<Settings>): void {
  settings.value = { ...NO_SETTINGS, ...settings.value, ...changes };
}

/** Continuations of one endpoint, one at a time. */
export class Run {
  readonly latest = signal<Continuation | null>(null);
  readonly busy = signal(false);
  readonly failure = signal<{ words: string; type: string } | null>(null);
  private controller: AbortController | null = null;

  constructor(readonly path: "completion" | "infill") {}

  stop(): void {
    this.controller?.abort();
  }

  async start(body: Record<string, unknown>): Promise<void> {
    if (this.busy.value) return;
    this.busy.value = true;
    this.failure.value = this.latest.value = null;
    this.controller = new AbortController();
    let found: Continuation | null = null;
    const frames = new FrameScheduler(() => {
      if (found) this.latest.value = { ...found };
    });
    try {
      const request = { ...nativeFields({ ...NO_SETTINGS, ...settings.value }), ...body };
      found = await requestContinuation(this.path, request, this.controller.signal, (one) => {
        found = one;
        frames.request();
      });
    } catch (error) {
      this.failure.value = { words: explain(error, "start"), type: error instanceof ApiFailure ? error.type : "" };
    } finally {
      frames.end();
      if (found) this.latest.value = { ...(found as Continuation) };
      this.busy.value = false;
    }
  }
}
