// Listens to `/live/events` while the view is looked at, and again when it ended.
import { signal, type Signal } from "@preact/signals";
import { ApiFailure, stream } from "../api/http";
import { merged, type Known, type Update } from "./state";

const AGAIN_MS = 1500;

export interface Followed {
  known: Signal<Known | null>;
  /** Why nothing comes; "": it does. */
  trouble: Signal<string>;
  stop: () => void;
}

/** Follows a stream until stopped; a tab that nobody sees does not listen. */
export function follow(path: string): Followed {
  const known = signal<Known | null>(null);
  const trouble = signal("");
  let stopped = false;
  let listening: AbortController | null = null;

  async function listen(): Promise<void> {
    const mine = (listening = new AbortController());
    while (!mine.signal.aborted) {
      try {
        for await (const event of stream("GET", path, { signal: mine.signal })) {
          trouble.value = "";
          known.value = merged(known.value, event as Update, Date.now() / 1000);
        }
        trouble.value = "The server has ended the view.";
      } catch (error) {
        if (mine.signal.aborted) return;
        if (error instanceof ApiFailure && error.status === 404) {
          trouble.value = "This server tells nothing of itself here: it is no llamado.";
          return;
        }
        trouble.value = error instanceof Error ? error.message : String(error);
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
    known,
    trouble,
    stop: () => {
      stopped = true;
      document.removeEventListener("visibilitychange", look);
      look();
    },
  };
}
