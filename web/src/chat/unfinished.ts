// Copies of a streaming answer in the browser's storage, so that a reload or a crash of the tab loses nothing.
import { saveUnfinished } from "./store";
import type { Message } from "./tree";

const SAVE_MS = 1000;

/** Stores the latest state of one message, at most once a second, and at once if the page is hidden or left. */
export class UnfinishedSaver {
  private timer: ReturnType<typeof setTimeout> | undefined;
  private savedAt = -Infinity;

  /** `latest` returns the present message. */
  constructor(private readonly latest: () => Message) {
    addEventListener("pagehide", this.save);
    document.addEventListener("visibilitychange", this.saveIfHidden);
  }

  /** Call after each change. */
  changed(): void {
    const wait = this.savedAt + SAVE_MS - performance.now();
    if (wait <= 0) this.save();
    else this.timer ??= setTimeout(this.save, wait);
  }

  end(): void {
    clearTimeout(this.timer);
    removeEventListener("pagehide", this.save);
    document.removeEventListener("visibilitychange", this.saveIfHidden);
  }

  private readonly save = (): void => {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.savedAt = performance.now();
    void saveUnfinished({ ...this.latest(), ending: "interrupted" });
  };

  private readonly saveIfHidden = (): void => {
    if (document.hidden) this.save();
  };
}
