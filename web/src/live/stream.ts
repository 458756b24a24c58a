// Connection to `/live/events`: reconnects while the view is open.
import { signal, type Signal } from "@preact/signals";
import { ApiFailure, stream } from "../api/http";
import { labels } from "../text";
import { applyUpdate, type LiveState, type Update } from "./state";

const AGAIN_MS = 1500;

export interface LiveStream {
  state: Signal<LiveState | null>;
  /** Error of the connection; "" while it works. */
  errorText: Signal<string>;
  stop: () => void;
}

/** Listen to a stream until stopped; paused while the tab is hidden. */
export function openStream(path: string): LiveStream {
  const state = signal<LiveState | null>(null);
  const errorText = signal("");
  let stopped = false;
  let listening: AbortController | null = null;

  async function listen(): Promise<void> {
    const mine = (listening = new AbortController());
    while (!mine.signal.aborted) {
      try {
        for await (const event of stream("GET", path, { signal: mine.signal })) {
          errorText.value = "";
          state.value = applyUpdate(state.value, event as Update, Date.now() / 1000);
        }
        errorText.value = labels.value.live.closed;
      } catch (error) {
        if (mine.signal.aborted) return;
        if (error instanceof ApiFailure && error.status === 404) {
          errorText.value = labels.value.live.notLlamado;
          return;
        }
        errorText.value = error instanceof Error ? error.message : String(error);
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  function look(): void {
    if (document.hidden || stopped) {
      listening?.abort();
      listening = null;
    } else if (!listening) void listen();
  }

  document.addEventListener("visibilitychange", look);
  look();
  return {
    state,
    errorText,
    stop: () => {
      stopped = true;
      document.removeEventListener("visibilitychange", look);
      look();
    },
  };
}
