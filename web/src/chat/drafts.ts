// Drafts: what is typed and attached but not sent, one for each chat. Texts outlive the page, attachments the view.
import { signal } from "@preact/signals";
import type { Attachment } from "./tree";

const texts = new Map<string, string>();
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

export function setDraftText(place: string, text: string): void {
  texts.set(place, text);
  try {
    if (text) localStorage.setItem(key(place), text);
    else localStorage.removeItem(key(place));
  } catch {
    // a browser that stores nothing, or has no room left: the draft ends with the page
  }
}

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
