// A continuation as a view shows it, while it is made and behind that.
import { signal } from "@preact/signals";
import { ApiFailure } from "../api/http";
import { explain } from "../api/problems";
import { NO_SETTINGS, type Settings } from "../chat/settings";
import { Pictures } from "../ui/pictures";
import { remembered } from "../ui/remembered";
import { asNative, type Continuation, goOn } from "./raw";

const TOKENS = 128; // a model that never ends would fill its context

/** What the views ask of the model. */
export const settings = remembered<Settings>("complete", { ...NO_SETTINGS, parameters: { n_predict: TOKENS } });

export function changeSettings(changes: Partial<Settings>): void {
  settings.value = { ...NO_SETTINGS, ...settings.value, ...changes };
}

/** The continuations of one endpoint, one at a time. */
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
    const pictures = new Pictures(() => {
      if (found) this.latest.value = { ...found };
    });
    try {
      const asked = { ...asNative({ ...NO_SETTINGS, ...settings.value }), ...body };
      found = await goOn(this.path, asked, this.controller.signal, (one) => {
        found = one;
        pictures.want();
      });
    } catch (error) {
      this.failure.value = { words: explain(error, "start again"), type: error instanceof ApiFailure ? error.type : "" };
    } finally {
      pictures.end();
      if (found) this.latest.value = { ...(found as Continuation) };
      this.busy.value = false;
    }
  }
}
