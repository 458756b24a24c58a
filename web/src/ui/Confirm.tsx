// A question before something is lost for good.
import { signal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";

interface Question {
  title: string;
  words: string;
  /** What the button that does it says. */
  act: string;
  done: (yes: boolean) => void;
}

const asked = signal<Question | null>(null);

/** Asks, and gives whether it shall be. */
export function confirmed(title: string, words: string, act: string): Promise<boolean> {
  asked.value?.done(false);
  return new Promise((done) => (asked.value = { title, words, act, done }));
}

/** Where questions are shown; once in the page. */
export function Confirm() {
  const dialog = useRef<HTMLDialogElement>(null);
  const question = asked.value;
  useEffect(() => {
    if (question) dialog.current?.showModal();
  }, [question]);
  if (!question) return null;
  const end = (yes: boolean) => {
    asked.value = null;
    question.done(yes);
  };
  return (
    <dialog ref={dialog} class="asks" aria-labelledby="asked-title" onClose={() => end(false)}>
      <h2 id="asked-title">{question.title}</h2>
      <p>{question.words}</p>
      <div class="row ends">
        <button type="button" onClick={() => end(false)}>
          Cancel
        </button>
        <button class="danger" type="button" onClick={() => end(true)}>
          {question.act}
        </button>
      </div>
    </dialog>
  );
}
