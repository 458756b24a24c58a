// The answers that stream: a note of each in the browser's storage, which a reload or a crash of the tab leaves behind.

const PREFIX = "llamado.answer.";

/** Without locks two tabs could resume one answer. There, only the tab itself sees its notes, after a reload. */
function storage(): Storage {
  return navigator.locks ? localStorage : sessionStorage;
}

/** Note that an answer streams. */
export function noteOpen(message: string, conversation: string): void {
  try {
    storage().setItem(PREFIX + message, conversation);
  } catch {
    // storage is full or disabled: the answer is marked as interrupted after a reload
  }
}

export function forgetOpen(message: string): void {
  storage().removeItem(PREFIX + message);
}

/** Return the ids of the noted answers, and of their conversations. */
export function openAnswers(): { message: string; conversation: string }[] {
  const keys = Object.keys(storage()).filter((key) => key.startsWith(PREFIX));
  return keys.map((key) => ({ message: key.slice(PREFIX.length), conversation: storage().getItem(key) ?? "" }));
}
