// The answers that stream: a note of each in the browser's storage, which a reload or a crash of the tab leaves behind.

const PREFIX = "llamado.answer.";

/** A note: an answer, its conversation, and its stream on the server. */
export interface OpenAnswer {
  message: string;
  conversation: string;
  stream: string;
}

interface Notes {
  keys(): Iterable<string>;
  get(key: string): string | null | undefined;
  set(key: string, value: string): unknown;
  delete(key: string): unknown;
}

/** Notes that all tabs see. */
const shared: Notes = {
  keys: () => Object.keys(localStorage),
  get: (key) => localStorage.getItem(key),
  set: (key, value) => localStorage.setItem(key, value),
  delete: (key) => localStorage.removeItem(key),
};

/**
 * Return notes that only this tab sees, after a reload too. They are in its storage only while no page is loaded: a copy of
 * the tab would have them, too.
 */
function ownNotes(): Notes {
  const notes = new Map<string, string>();
  const take = () => {
    for (const key of Object.keys(sessionStorage).filter((one) => one.startsWith(PREFIX))) {
      notes.set(key, sessionStorage.getItem(key)!);
      sessionStorage.removeItem(key);
    }
  };
  withStorage(take);
  addEventListener("pagehide", () => withStorage(() => notes.forEach((value, key) => sessionStorage.setItem(key, value))));
  addEventListener("pageshow", () => withStorage(take)); // back from the browser's cache of pages
  return notes;
}

// Without locks two tabs could resume one answer.
const notes = globalThis.navigator?.locks ? shared : ownNotes();

/** Call `use`. Returns undefined if the storage is disabled or full: answers are then not resumed. */
function withStorage<T>(use: () => T): T | undefined {
  try {
    return use();
  } catch {
    return undefined;
  }
}

/** Note that an answer streams. Returns an earlier stream of it whose note this one replaces. */
export function noteOpen({ message, conversation, stream }: OpenAnswer): string | undefined {
  const earlier = openAnswers().find((one) => one.message === message)?.stream;
  withStorage(() => notes.set(PREFIX + message, `${conversation} ${stream}`));
  return earlier === stream ? undefined : earlier;
}

/** Forget an answer, unless it has another stream by now. */
export function forgetOpen(message: string, stream: string): void {
  if (openAnswers().some((one) => one.message === message && one.stream === stream)) withStorage(() => notes.delete(PREFIX + message));
}

export function openAnswers(): OpenAnswer[] {
  const found = withStorage(() =>
    [...notes.keys()]
      .filter((key) => key.startsWith(PREFIX))
      .map((key) => {
        const [conversation = "", stream = ""] = (notes.get(key) ?? "").split(" ");
        return { message: key.slice(PREFIX.length), conversation, stream };
      }),
  );
  return found ?? [];
}
