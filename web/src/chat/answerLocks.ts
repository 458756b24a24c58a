// Locks of streaming answers. A tab holds one for each of its answers, and the browser releases it if the tab crashes: the
// tabs that show the answer see at once that it ended. Browsers offer locks on HTTPS and localhost only; elsewhere the
// answer of a crashed tab looks as if it streamed until the page is reloaded.
const locks: LockManager | undefined = globalThis.navigator?.locks;

/** Messages whose locks this tab waits for. */
const followed = new Set<string>();

function nameOf(message: string): string {
  return `llamado answer ${message}`;
}

/** Hold the lock of an answer until the returned function is called. */
export function lockAnswer(message: string): () => void {
  let release: () => void = () => undefined;
  const ended = new Promise<void>((resolve) => (release = resolve));
  void locks?.request(nameOf(message), () => ended);
  return release;
}

/** Take the lock of an answer that no tab streams; return its release, or null if a tab streams it. */
export function claimAnswer(message: string): Promise<(() => void) | null> {
  return new Promise((resolve) => {
    if (!locks) return resolve(() => undefined);
    void locks.request(nameOf(message), { ifAvailable: true }, (lock) => {
      if (!lock) return resolve(null);
      return new Promise<void>((release) => resolve(release));
    });
  });
}

/** Call `onEnd` once the tab that streams an answer has ended it or is gone. */
export function whenUnlocked(message: string, onEnd: () => void): void {
  if (!locks || followed.has(message)) return;
  followed.add(message);
  void locks.request(nameOf(message), () => {
    followed.delete(message);
    onEnd();
  });
}
