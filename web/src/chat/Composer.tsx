import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { Chips } from "./Chips";
import { readAttachment } from "./attachments";
import { draftAttachments, draftText, dropDraft, setDraftAttachments, setDraftText } from "./drafts";
import type { Attachment } from "./tree";

interface Given {
  /** Whether an answer is being made; then it can be stopped, and nothing sent. */
  busy: boolean;
  onStop: () => void;
  onSend: (text: string, attachments: Attachment[]) => Promise<void>;
  /** What the draft belongs to. When it changes, its own draft is shown and the field has the focus. */
  place: string;
}

/** Whether there are keys to write with: a touched screen would raise its own over half of the page. */
const HAS_KEYS = matchMedia("(hover: hover) and (pointer: fine)");

/** Where a message is written: Enter sends, Shift+Enter begins a line; files are attached, dropped or pasted. */
export function Composer({ busy, onStop, onSend, place }: Given) {
  const field = useRef<HTMLTextAreaElement>(null);
  const file = useRef<HTMLInputElement>(null);
  const attachments = draftAttachments(place);
  const [said, setSaid] = useState("");
  const [over, setOver] = useState(false);

  useLayoutEffect(() => {
    field.current!.value = draftText(place);
    fit();
    setSaid("");
  }, [place]);
  useEffect(() => {
    if (HAS_KEYS.matches) field.current?.focus({ preventScroll: true });
  }, [place]);

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
    dropDraft(place);
    setSaid("");
    void onSend(text, [...attachments]);
  }

  async function attach(files: Iterable<File>) {
    for (const one of files) {
      try {
        setSaid(`Reading ${one.name}…`);
        const read = await readAttachment(one);
        setDraftAttachments(place, [...draftAttachments(place), read]);
        setSaid("");
      } catch (error) {
        setSaid(`${one.name}: ${error instanceof Error ? error.message : String(error)}`);
      }
    }
    if (file.current) file.current.value = "";
  }

  return (
    <form
      class={`composer ${over ? "over" : ""}`}
      onSubmit={submit}
      onDragOver={(event) => (event.preventDefault(), setOver(true))}
      onDragLeave={() => setOver(false)}
      onDrop={(event) => {
        event.preventDefault();
        setOver(false);
        void attach(event.dataTransfer?.files ?? []);
      }}
    >
      <div class="composer-box">
        {(attachments.length > 0 || said) && (
          <div class="attachments" role="status">
            <Chips files={attachments} onChange={(files) => setDraftAttachments(place, files)} />
            {said}
          </div>
        )}
        <div class="composer-row">
          <IconButton icon="plus" label="Attach files" onClick={() => file.current?.click()} />
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
            placeholder={over ? "Drop the files here" : "Ask something"}
            dir="auto"
            enterkeyhint="send"
            onInput={(event) => {
              setDraftText(place, event.currentTarget.value);
              fit();
            }}
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
            <button class="primary round" type="button" title="Stop (Escape)" onClick={onStop}>
              <Icon name="stop" />
              <span class="hidden">Stop</span>
            </button>
          ) : (
            <button class="primary round" type="submit" title="Send (Enter; Shift+Enter begins a line)">
              <Icon name="up" />
              <span class="hidden">Send</span>
            </button>
          )}
        </div>
      </div>
    </form>
  );
}
