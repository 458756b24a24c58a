import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { IconButton } from "../ui/IconButton";
import { isLibraryOpen, prompts, removePrompt, type SavedPrompt, savePrompt } from "./prompts";

/** Dialog in which saved prompts are added, changed and deleted. */
export function PromptLibrary() {
  const t = labels.value.prompts;
  const dialog = useRef<HTMLDialogElement>(null);
  const [edited, setEdited] = useState<SavedPrompt | "new" | null>(prompts.value.length ? null : "new");
  useLayoutEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} class="library" aria-labelledby="library-title" onClose={() => (isLibraryOpen.value = false)}>
      <div class="row">
        <h2 id="library-title">{t.title}</h2>
        <IconButton icon="close" label={labels.value.common.close} onClick={() => dialog.current?.close()} />
      </div>
      <p>{t.about}</p>
      <ul>
        {prompts.value.map((one) => (
          <li key={one.name} class="row">
            <b>/{displayText(one.name)}</b>
            <span>{displayText(one.text.slice(0, 200))}</span>
            <IconButton icon="pencil" label={t.edit(one.name)} onClick={() => setEdited(one)} />
            <IconButton icon="trash" label={t.remove(one.name)} onClick={() => removePrompt(one.name)} />
          </li>
        ))}
      </ul>
      {edited ? (
        <PromptForm key={edited === "new" ? "" : edited.name} before={edited === "new" ? undefined : edited} onDone={() => setEdited(null)} />
      ) : (
        <button type="button" onClick={() => setEdited("new")}>
          {t.add}
        </button>
      )}
    </dialog>
  );
}

function PromptForm({ before, onDone }: { before: SavedPrompt | undefined; onDone: () => void }) {
  const t = labels.value.prompts;
  const name = useRef<HTMLInputElement>(null);
  const text = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => name.current?.focus(), []);
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault();
        savePrompt(before?.name, { name: name.current!.value.trim().replace(/^\/+/, ""), text: text.current!.value });
        onDone();
      }}
    >
      <label>
        {t.name}
        <input ref={name} type="text" required maxLength={40} defaultValue={before?.name ?? ""} />
      </label>
      <label>
        {t.text}
        <textarea ref={text} rows={5} required defaultValue={before?.text ?? ""} />
      </label>
      <div class="row">
        <button class="primary" type="submit">
          {labels.value.common.save}
        </button>
        <button type="button" onClick={onDone}>
          {labels.value.common.cancel}
        </button>
      </div>
    </form>
  );
}
