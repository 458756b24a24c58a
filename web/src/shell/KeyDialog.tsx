import { useEffect, useRef } from "preact/hooks";
import { apiKey, keyWanted } from "../api/http";

/** Asks for the key of --api-key, when a request was refused without it. */
export function KeyDialog() {
  const dialog = useRef<HTMLDialogElement>(null);
  const field = useRef<HTMLInputElement>(null);
  const wanted = keyWanted.value;

  useEffect(() => {
    if (wanted && !dialog.current?.open) {
      dialog.current?.showModal();
      field.current?.focus();
    }
  }, [wanted]);

  function submit(event: Event) {
    event.preventDefault();
    keyWanted.value = false;
    apiKey.value = field.current?.value.trim() ?? "";
    dialog.current?.close();
  }

  return (
    <dialog ref={dialog} class="key-dialog" aria-labelledby="key-title" onClose={() => (keyWanted.value = false)}>
      <form onSubmit={submit}>
        <h2 id="key-title">This server asks for a key</h2>
        <p>{apiKey.value ? "The key that was given is not one of the server's." : "It was started with --api-key."}</p>
        <label>
          Key
          <input ref={field} type="password" autocomplete="current-password" required />
        </label>
        <button class="primary" type="submit">
          Go on
        </button>
      </form>
    </dialog>
  );
}
