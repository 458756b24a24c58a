import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { isModelLoaded, type Modalities, modalitiesOf, props } from "../api/server";
import { readMedia } from "../media/read";
import { Recorder } from "../media/Recorder";
import { countTokens } from "../media/tokens";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { AttachButton } from "./AttachButton";
import { AttachmentChips } from "./AttachmentChips";
import { readAttachment } from "./attachments";
import { draftAttachments, draftText, dropDraft, setDraftAttachments, setDraftText } from "./drafts";
import { type Attachment, isMedia, type MediaFile } from "./tree";

interface Props {
  /** True while an answer streams: it can be stopped, and nothing can be sent. */
  busy: boolean;
  onStop: () => void;
  onSend: (text: string, attachments: Attachment[]) => Promise<void>;
  /** Owner of the draft: a chat's id, or a view. A new place shows its own draft and focuses the field. */
  place: string;
  /** Models that get the message, as requests name them. */
  models: readonly string[];
}

/** True if the device has a keyboard: on a touch screen, focus would open an on-screen keyboard over half of the page. */
const HAS_KEYS = matchMedia("(hover: hover) and (pointer: fine)");

/** Return the input that all models accept. */
function acceptedByAll(models: readonly string[]): Modalities {
  const all = models.map(modalitiesOf);
  return { image: all.every((one) => one.image), audio: all.every((one) => one.audio) };
}

function hasFiles(data: DataTransfer | null): data is DataTransfer {
  return data?.types.includes("Files") ?? false;
}

/** Return true if the clipboard holds text. Office programs add a picture of it. */
function hasFormattedText(data: DataTransfer): boolean {
  return data.types.includes("text/plain") && data.types.includes("text/html");
}

/** Input for a message: Enter sends, Shift+Enter starts a new line; files can be attached, dropped or pasted. */
export function Composer({ busy, onStop, onSend, place, models }: Props) {
  const t = labels.value.chat;
  const field = useRef<HTMLTextAreaElement>(null);
  const form = useRef<HTMLFormElement>(null);
  /** Settled once all chosen files are read; null if there are none to read. */
  const reading = useRef<Promise<void> | null>(null);
  const shownPlace = useRef(place);
  shownPlace.current = place;
  const attachments = draftAttachments(place);
  const accepts = acceptedByAll(models);
  const [status, setStatus] = useState("");
  const [announced, setAnnounced] = useState("");
  const [over, setOver] = useState(false);
  const [records, setRecords] = useState(false);

  useLayoutEffect(() => {
    field.current!.value = draftText(place);
    fit();
    setStatus("");
    setRecords(false);
  }, [place]);
  useEffect(() => {
    if (HAS_KEYS.matches) field.current?.focus({ preventScroll: true });
  }, [place]);
  useEffect(() => {
    // Files dropped anywhere else would replace the page.
    const onDragOver = (event: DragEvent) => {
      if (!hasFiles(event.dataTransfer)) return;
      event.preventDefault();
      setOver(true);
    };
    const onDragLeave = (event: DragEvent) => {
      if (!event.relatedTarget) setOver(false);
    };
    const onDrop = (event: DragEvent) => {
      if (!hasFiles(event.dataTransfer)) return;
      event.preventDefault();
      setOver(false);
      attach([...event.dataTransfer.files]);
    };
    addEventListener("dragover", onDragOver);
    addEventListener("dragleave", onDragLeave);
    addEventListener("drop", onDrop);
    return () => {
      removeEventListener("dragover", onDragOver);
      removeEventListener("dragleave", onDragLeave);
      removeEventListener("drop", onDrop);
    };
  });

  function fit() {
    const area = field.current!;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  function submit(event: Event) {
    event.preventDefault();
    const text = field.current!.value.trim();
    if (reading.current) {
      // The message follows once its files are read, unless the user opened another chat.
      void reading.current.then(() => shownPlace.current === place && form.current?.requestSubmit());
      return;
    }
    if (busy || (!text && !attachments.length)) return;
    field.current!.value = "";
    fit();
    dropDraft(place);
    setStatus("");
    void onSend(text, [...attachments]);
  }

  function attach(files: readonly File[]) {
    // One after the other: files are sent in the order in which they were attached.
    const all = Promise.resolve(reading.current)
      .then(() => readAll(files))
      .then(() => {
        if (reading.current === all) reading.current = null;
      });
    reading.current = all;
  }

  async function readAll(files: readonly File[]) {
    const problems: string[] = [];
    for (const one of files) {
      try {
        setStatus(t.reading(one.name));
        const media = await readMedia(one, accepts);
        const read = media ?? (await readAttachment(one));
        setDraftAttachments(place, [...draftAttachments(place), read]);
        setAnnounced(t.attached(one.name));
        if (media) void showTokens(media);
      } catch (error) {
        problems.push(`${one.name}: ${error instanceof Error ? error.message : String(error)}`);
      }
    }
    setStatus(problems.join(" "));
  }

  /** Add the number of tokens to an attached file once the server has counted them. */
  async function showTokens(file: MediaFile) {
    const [model = ""] = models;
    if (models.some((one) => one !== model) || !isModelLoaded(model)) return;
    const tokens = await countTokens(file, model);
    if (tokens === undefined) return;
    setDraftAttachments(
      place,
      draftAttachments(place).map((one) => (one === file ? { ...file, tokens } : one)),
    );
  }

  function removed(left: Attachment[]) {
    setDraftAttachments(place, left);
    setAnnounced("");
    if (HAS_KEYS.matches) field.current?.focus({ preventScroll: true });
  }

  function endRecording(problem: string) {
    setRecords(false);
    setStatus(problem);
    if (HAS_KEYS.matches) field.current?.focus({ preventScroll: true });
  }

  return (
    <form ref={form} class={`composer ${over ? "over" : ""}`} onSubmit={submit}>
      <div class="composer-box">
        {attachments.length > 0 && (
          <div class="attachments">
            <AttachmentChips files={attachments} onChange={removed} />
          </div>
        )}
        <p class="composer-status" role="status">
          {status}
        </p>
        <p class="hidden" role="status">
          {announced}
        </p>
        {records && (
          <Recorder
            onError={endRecording}
            onDone={(sound) => {
              endRecording("");
              if (sound) attach([new File([sound], recordingName(draftAttachments(place)), { type: sound.type })]);
            }}
          />
        )}
        <div class="composer-row">
          <AttachButton accepts={accepts} onFiles={attach} />
          {accepts.audio && <IconButton icon="mic" label={t.recordSound} disabled={records} onClick={() => setRecords(true)} />}
          <label class="hidden" for="message">
            {t.message}
          </label>
          <textarea
            id="message"
            ref={field}
            rows={1}
            placeholder={over ? t.dropFiles : t.messageModel(models.length === 1 ? models[0] || (props.value.model_alias ?? "") : "")}
            dir="auto"
            enterkeyhint="send"
            onInput={(event) => {
              setDraftText(place, event.currentTarget.value);
              fit();
            }}
            onPaste={(event) => {
              if (!hasFiles(event.clipboardData) || hasFormattedText(event.clipboardData)) return;
              event.preventDefault();
              attach([...event.clipboardData.files]);
            }}
            onKeyDown={(event) => {
              if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
              else if (event.key === "Escape" && busy) onStop();
            }}
          />
          {busy ? (
            <button class="primary round" type="button" title={t.stopTitle} onClick={onStop}>
              <Icon name="stop" />
              <span class="hidden">{labels.value.common.stop}</span>
            </button>
          ) : (
            <button class="primary round" type="submit" title={t.sendTitle}>
              <Icon name="up" />
              <span class="hidden">{t.send}</span>
            </button>
          )}
        </div>
      </div>
    </form>
  );
}

/** Return a name that no recording of the draft has. */
function recordingName(attachments: readonly Attachment[]): string {
  const names = new Set(attachments.filter(isMedia).map((one) => one.name));
  for (let number = 1; ; number++) {
    const name = labels.value.chat.recordingName(number);
    if (!names.has(name)) return name;
  }
}
