import { useLayoutEffect, useRef } from "preact/hooks";
import { labels } from "../text";
import { resend } from "./actions";
import { saveMessage } from "./store";
import type { Message } from "./tree";

/** Edits a message in its place: Ctrl+Enter saves, Escape cancels. */
export function Editor({ message, onDone }: { message: Message; onDone: () => void }) {
  const t = labels.value.chat;
  const field = useRef<HTMLTextAreaElement>(null);
  useLayoutEffect(() => field.current?.focus(), []); // not a frame later: keys would go elsewhere until then

  /** An edited user message starts another branch; an edited answer is changed in place. */
  function submit(event: Event) {
    event.preventDefault();
    const content = field.current!.value;
    onDone();
    if (message.role === "user") void resend(message, content);
    else void saveMessage({ ...message, content }, { leaf: false });
  }

  function pressed(event: KeyboardEvent) {
    if (event.key === "Escape") onDone();
    else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  }

  return (
    <form class="editor" onSubmit={submit} onKeyDown={pressed}>
      <label class="hidden" for={`edit-${message.id}`}>
        {t.editMessage}
      </label>
      <textarea
        id={`edit-${message.id}`}
        ref={field}
        rows={Math.min(16, message.content.split("\n").length + 2)}
        defaultValue={message.content}
      />
      <div class="row">
        <button class="primary" type="submit">
          {message.role === "user" ? t.sendAgain : labels.value.common.save}
        </button>
        <button type="button" onClick={onDone}>
          {labels.value.common.cancel}
        </button>
      </div>
    </form>
  );
}
