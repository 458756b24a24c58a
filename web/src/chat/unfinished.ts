// Copies of a streaming answer in the browser's storage, so that a reload or a crash of the tab loses nothing, and in other
// tabs.
import { saveUnfinished } from "./store";
import { announce } from "./tabs";
import type { Message } from "./tree";

const SAVE_MS = 1000;

/** Stores the latest state of one message, at most once a second, and at once if the page is hidden or left. */
export class UnfinishedSaver {
  private timer: ReturnType<typeof setTimeout> | undefined;
  private savedAt = -Infinity;

  /** `latest` returns the present message, as it is stored. */
  constructor(private readonly latest: () => Message) {
    addEventListener("pagehide", this.leave);
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
    removeEventListener("pagehide", this.leave);
    document.removeEventListener("visibilitychange", this.saveIfHidden);
  }

  private readonly save = (): void => {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.savedAt = performance.now();
    const message = this.latest();
    void saveUnfinished(message);
    announce({ conversation: message.conversation, streaming: message });
  };

  private readonly leave = (): void => {
    this.save();
    announce({ conversation: this.latest().conversation });
  };

  private readonly saveIfHidden = (): void => {
    if (document.hidden) this.save();
  };
}
