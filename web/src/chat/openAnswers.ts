// The answers that stream: a note of each in the browser's storage, which a reload or a crash of the tab leaves behind.

const PREFIX = "llamado.answer.";

/** Call `use` with the storage of the notes. Returns undefined if it is disabled or full: answers are then not resumed. */
function withStorage<T>(use: (storage: Storage) => T): T | undefined {
  try {
    // Without locks two tabs could resume one answer. There, only the tab itself sees its notes, after a reload.
    return use(navigator.locks ? localStorage : sessionStorage);
  } catch {
    return undefined;
  }
}

/** Note that an answer streams. */
export function noteOpen(message: string, conversation: string): void {
  withStorage((storage) => storage.setItem(PREFIX + message, conversation));
}

export function forgetOpen(message: string): void {
  withStorage((storage) => storage.removeItem(PREFIX + message));
}

/** Return the ids of the noted answers, and of their conversations. */
export function openAnswers(): { message: string; conversation: string }[] {
  const found = withStorage((storage) =>
    Object.keys(storage)
      .filter((key) => key.startsWith(PREFIX))
      .map((key) => ({ message: key.slice(PREFIX.length), conversation: storage.getItem(key) ?? "" })),
  );
  return found ?? [];
}
