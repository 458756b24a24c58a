import { useLayoutEffect, useRef } from "preact/hooks";
import { apiKey, isKeyRequired } from "../api/http";
import { labels } from "../text";

/** Asks for the API key after the server rejected a request without a valid one. */
export function KeyDialog() {
  const t = labels.value.shell;
  const dialog = useRef<HTMLDialogElement>(null);
  const field = useRef<HTMLInputElement>(null);
  const isRequired = isKeyRequired.value;

  useLayoutEffect(() => {
    if (isRequired && !dialog.current?.open) {
      dialog.current?.showModal();
      field.current?.focus();
    }
  }, [isRequired]);

  function submit(event: Event) {
    event.preventDefault();
    isKeyRequired.value = false;
    apiKey.value = field.current?.value.trim() ?? "";
    dialog.current?.close();
  }

  return (
    <dialog ref={dialog} class="key-dialog" aria-labelledby="key-title" onClose={() => (isKeyRequired.value = false)}>
      <form onSubmit={submit}>
        <h2 id="key-title">{t.keyRequired}</h2>
        <p>{apiKey.value ? t.keyRejected : t.keyReason}</p>
        <label>
          {t.key}
          <input ref={field} type="password" autocomplete="current-password" required />
        </label>
        <button class="primary" type="submit">
          {t.continue}
        </button>
      </form>
    </dialog>
  );
}
