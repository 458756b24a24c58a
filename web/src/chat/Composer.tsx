import { useRef, useState } from "preact/hooks";
import { Icon } from "../ui/Icon";
import { Chips } from "./Chips";
import { readAttachment } from "./attachments";
import type { Attachment } from "./tree";

interface Given {
  /** Whether an answer is being made; then it can be stopped, and nothing sent. */
  busy: boolean;
  onStop: () => void;
  onSend: (text: string, attachments: Attachment[]) => Promise<void>;
}

/** Where a message is written: Enter sends, Shift+Enter begins a line; files are attached, dropped or pasted. */
export function Composer({ busy, onStop, onSend }: Given) {
  const field = useRef<HTMLTextAreaElement>(null);
  const file = useRef<HTMLInputElement>(null);
  const [attachments, setAttachments] = useState<Attachment[]>([]);
  const [said, setSaid] = useState("");

  function fit() {
    const area = field.current!;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  function submit(event: Event) {
    event.preventDefault();
    const text = field.current!.value.trim();
    if (busy || (!text && !attachments.length)) return;
    field.current!.value = "";
    fit();
    setAttachments([]);
    setSaid("");
    void onSend(text, attachments);
  }

  async function attach(files: Iterable<File>) {
    for (const one of files) {
      try {
        setSaid(`Reading ${one.name}…`);
        const read = await readAttachment(one);
        setAttachments((before) => [...before, read]);
        setSaid("");
      } catch (error) {
        setSaid(`${one.name}: ${error instanceof Error ? error.message : String(error)}`);
      }
    }
    if (file.current) file.current.value = "";
  }

  return (
    <form
      class="composer"
      onSubmit={submit}
      onDragOver={(event) => event.preventDefault()}
      onDrop={(event) => {
        event.preventDefault();
        void attach(event.dataTransfer?.files ?? []);
      }}
    >
      {(attachments.length > 0 || said) && (
        <div class="attachments" role="status">
          <Chips files={attachments} onChange={setAttachments} />
          {said}
        </div>
      )}
      <div class="composer-row">
        <button class="quiet" type="button" aria-label="Attach files" title="Attach files" onClick={() => file.current?.click()}>
          <Icon name="plus" />
        </button>
        <input
          ref={file}
          class="hidden"
          type="file"
          multiple
          tabIndex={-1}
          aria-label="Files to attach"
          onChange={(event) => void attach([...(event.currentTarget.files ?? [])])}
        />
        <label class="hidden" for="message">
          Message
        </label>
        <textarea
          id="message"
          ref={field}
          rows={1}
          placeholder="Ask something"
          dir="auto"
          onInput={fit}
          onPaste={(event) => {
            const files = [...(event.clipboardData?.files ?? [])];
            if (files.length) {
              event.preventDefault();
              void attach(files);
            }
          }}
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
            else if (event.key === "Escape" && busy) onStop();
          }}
        />
        {busy ? (
          <button class="primary" type="button" onClick={onStop}>
            Stop
          </button>
        ) : (
          <button class="primary" type="submit">
            Send
          </button>
        )}
      </div>
    </form>
  );
}
