// Confirmation before data is deleted.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { labels } from "../text";

interface Question {
  title: string;
  text: string;
  /** Label of the button that confirms. */
  action: string;
  done: (yes: boolean) => void;
}

const pending = signal<Question | null>(null);

/** Ask the user, and resolve to true if they confirm. */
export function askConfirmation(title: string, text: string, action: string): Promise<boolean> {
  pending.value?.done(false);
  return new Promise((done) => (pending.value = { title, text, action, done }));
}

/** The dialog that shows questions; once per page. */
export function Confirm() {
  const dialog = useRef<HTMLDialogElement>(null);
  const question = pending.value;
  useEffect(() => {
    if (question) dialog.current?.showModal();
  }, [question]);
  if (!question) return null;
  const end = (yes: boolean) => {
    pending.value = null;
    question.done(yes);
  };
  return (
    <dialog ref={dialog} class="confirm" aria-labelledby="confirm-title" onClose={() => end(false)}>
      <h2 id="confirm-title">{question.title}</h2>
      <p>{question.text}</p>
      <div class="row ends">
        <button type="button" onClick={() => end(false)}>
          {labels.value.common.cancel}
        </button>
        <button class="danger" type="button" onClick={() => end(true)}>
          {question.action}
        </button>
      </div>
    </dialog>
  );
}
