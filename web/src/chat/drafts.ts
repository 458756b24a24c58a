// Drafts: unsent text and attachments of each chat. Texts survive a reload, attachments do not.
import { signal } from "@preact/signals";
import type { Attachment } from "./tree";

const WRITE_MS = 300;

const texts = new Map<string, string>();
/** Places whose text is not stored yet. */
const unwritten = new Set<string>();
let timer: ReturnType<typeof setTimeout> | undefined;
const attachments = signal<ReadonlyMap<string, readonly Attachment[]>>(new Map());

function key(place: string): string {
  return `llamado.draft.${place}`;
}

export function draftText(place: string): string {
  try {
    return texts.get(place) ?? localStorage.getItem(key(place)) ?? "";
  } catch {
    return "";
  }
}

/** Counts changes of drafts' texts. */
export const draftChanges = signal(0);
/** Counts texts that something else than typing put into drafts; fields show them. */
export const replacedDrafts = signal(0);

/** Put a text before what is in a draft. */
export function prependDraft(place: string, text: string, files: readonly Attachment[] = []): void {
  setDraftText(place, [text, draftText(place)].filter(Boolean).join("\n\n"));
  if (files.length) setDraftAttachments(place, [...draftAttachments(place), ...files]);
  replacedDrafts.value++;
}

export function setDraftText(place: string, text: string): void {
  texts.set(place, text);
  draftChanges.value++;
  unwritten.add(place);
  timer ??= setTimeout(writeTexts, WRITE_MS);
}

/** Store texts, not with each key: browsers take long to store long ones. */
function writeTexts(): void {
  clearTimeout(timer);
  timer = undefined;
  for (const place of unwritten) {
    const text = texts.get(place);
    try {
      if (text) localStorage.setItem(key(place), text);
      else localStorage.removeItem(key(place));
    } catch {
      // storage is disabled or full: the draft is lost with the page
    }
  }
  unwritten.clear();
}

globalThis.document?.addEventListener("visibilitychange", () => document.hidden && writeTexts());

export function draftAttachments(place: string): readonly Attachment[] {
  return attachments.value.get(place) ?? [];
}

export function setDraftAttachments(place: string, files: readonly Attachment[]): void {
  attachments.value = new Map(attachments.value).set(place, files);
}

export function dropDraft(place: string): void {
  setDraftText(place, "");
  setDraftAttachments(place, []);
}
