import type { ComponentChildren } from "preact";
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
import { draftAttachments, draftText, dropDraft, prependDraft, replacedDrafts, setDraftAttachments, setDraftText } from "./drafts";
import { filesToAttach, unusedName } from "./paste";
import type { SavedPrompt } from "./prompts";
import { PromptSuggestions, suggestionId, usePromptSuggestions } from "./PromptSuggestions";
import type { Attachment, MediaFile } from "./tree";
import { useDrop } from "./useDrop";

interface Props {
  /** True while an answer streams: it can be stopped. */
  busy: boolean;
  /** True if a message can be sent meanwhile, which then waits. */
  canQueue?: boolean;
  onStop: () => void;
  onSend: (text: string, attachments: Attachment[]) => Promise<void>;
  /** Owner of the draft: a chat's id, or a view. A new place shows its own draft and focuses the field. */
  place: string;
  /** Models that get the message, as requests name them. */
  models: readonly string[];
  /** Controls below the field. */
  children?: ComponentChildren;
}

/** True if the device has a keyboard: on a touch screen, focus would open an on-screen keyboard over half of the page. */
const HAS_KEYS = matchMedia("(hover: hover) and (pointer: fine)");

/** Longer texts fill the whole height, in characters: measuring them with each key would take long. */
const FULL_HEIGHT_FROM = 5000;
/** True if the browser fits fields to their text by itself. */
const GROWS = CSS.supports("field-sizing", "content");

/** Return the input that all models accept. */
function acceptedByAll(models: readonly string[]): Modalities {
  const all = models.map(modalitiesOf);
  return { image: all.every((one) => one.image), audio: all.every((one) => one.audio) };
}

/** Input for a message: Enter sends, Shift+Enter starts a new line; files can be attached, dropped or pasted. */
export function Composer({ busy, canQueue = false, onStop, onSend, place, models, children }: Props) {
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
  const [records, setRecords] = useState(false);
  const [hasText, setHasText] = useState(false);

  useLayoutEffect(() => {
    field.current!.value = draftText(place);
    fit();
    setStatus("");
    setRecords(false);
  }, [place, replacedDrafts.value]);
  useEffect(() => {
    if (HAS_KEYS.matches) field.current?.focus({ preventScroll: true });
  }, [place, replacedDrafts.value]);
  const over = useDrop(attach);
  const suggestions = usePromptSuggestions(place, insertPrompt);

  function fit() {
    const area = field.current!;
    setHasText(area.value.trim() !== "");
    const isLong = area.value.length > FULL_HEIGHT_FROM;
    area.classList.toggle("long", isLong);
    if (isLong || GROWS) return;
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
    if ((busy && !canQueue) || (!text && !attachments.length)) return;
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
        read.name ||= unusedName(draftAttachments(place), t.pastedName);
        setDraftAttachments(place, [...draftAttachments(place), read]);
        setAnnounced(t.attached(read.name));
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

  function insertPrompt({ text }: SavedPrompt) {
    setDraftText(place, "");
    prependDraft(place, text);
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
              if (sound) attach([new File([sound], unusedName(draftAttachments(place), t.recordingName), { type: sound.type })]);
            }}
          />
        )}
        <PromptSuggestions suggestions={suggestions} onInsert={insertPrompt} />
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
            aria-controls={suggestions.found.length ? "prompts" : undefined}
            aria-activedescendant={suggestions.found.length ? suggestionId(suggestions.chosen) : undefined}
            onInput={(event) => {
              setDraftText(place, event.currentTarget.value);
              fit();
            }}
            onPaste={(event) => {
              const files = filesToAttach(event.clipboardData);
              if (!files.length) return;
              event.preventDefault();
              attach(files);
            }}
            onKeyDown={(event) => {
              if (suggestions.handleKey(event)) return;
              if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
              else if (event.key === "Escape" && busy) onStop();
            }}
          />
          {busy && (
            <button class="primary round" type="button" title={t.stopTitle} onClick={onStop}>
              <Icon name="stop" />
              <span class="hidden">{labels.value.common.stop}</span>
            </button>
          )}
          {(!busy || (canQueue && (hasText || attachments.length > 0))) && (
            <button class="primary round" type="submit" title={busy ? t.queueTitle : t.sendTitle}>
              <Icon name="up" />
              <span class="hidden">{busy ? t.queue : t.send}</span>
            </button>
          )}
        </div>
        {children && <div class="composer-foot">{children}</div>}
      </div>
    </form>
  );
}
