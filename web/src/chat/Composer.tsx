import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { AttachmentChips } from "./AttachmentChips";
import { readAttachment } from "./attachments";
import { draftAttachments, draftText, dropDraft, setDraftAttachments, setDraftText } from "./drafts";
import type { Attachment } from "./tree";

interface Props {
  /** True while an answer streams: it can be stopped, and nothing can be sent. */
  busy: boolean;
  onStop: () => void;
  onSend: (text: string, attachments: Attachment[]) => Promise<void>;
  /** Owner of the draft: a chat's id, or a view. A new place shows its own draft and focuses the field. */
  place: string;
}

/** True if the device has a keyboard: on a touch screen, focus would open an on-screen keyboard over half of the page. */
const HAS_KEYS = matchMedia("(hover: hover) and (pointer: fine)");

/** Input for a message: Enter sends, Shift+Enter starts a new line; files can be attached, dropped or pasted. */
export function Composer({ busy, onStop, onSend, place }: Props) {
  const field = useRef<HTMLTextAreaElement>(null);
  const file = useRef<HTMLInputElement>(null);
  const attachments = draftAttachments(place);
  const [status, setStatus] = useState("");
  const [over, setOver] = useState(false);

  useLayoutEffect(() => {
    field.current!.value = draftText(place);
    fit();
    setStatus("");
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
    setStatus("");
    void onSend(text, [...attachments]);
  }

  async function attach(files: Iterable<File>) {
    for (const one of files) {
      try {
        setStatus(`Reading ${one.name}…`);
        const read = await readAttachment(one);
        setDraftAttachments(place, [...draftAttachments(place), read]);
        setStatus("");
      } catch (error) {
        setStatus(`${one.name}: ${error instanceof Error ? error.message : String(error)}`);
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
        {(attachments.length > 0 || status) && (
          <div class="attachments" role="status">
            <AttachmentChips files={attachments} onChange={(files) => setDraftAttachments(place, files)} />
            {status}
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
            <button class="primary round" type="submit" title="Send (Enter; Shift+Enter: new line)">
              <Icon name="up" />
              <span class="hidden">Send</span>
            </button>
          )}
        </div>
      </div>
    </form>
  );
}
