// Pasted files and long texts, which become attachments.
import { preferences } from "./preferences";
import type { Attachment } from "./tree";
import { hasFiles } from "./useDrop";

/** Return true if the clipboard holds text. Office programs add a picture of it. */
function hasFormattedText(data: DataTransfer): boolean {
  return data.types.includes("text/plain") && data.types.includes("text/html");
}

/** Return what to attach instead of pasting it into the message: files, or a long text as a file without a name. */
export function filesToAttach(data: DataTransfer | null): File[] {
  if (!data) return [];
  if (hasFiles(data) && !hasFormattedText(data)) return [...data.files];
  const text = data.getData("text/plain");
  const { pasteLimit } = preferences.value;
  if (!pasteLimit || text.length < pasteLimit) return [];
  return [new File([text], "", { type: "text/plain" })];
}

/** Return a name that no attachment has. */
export function unusedName(attachments: readonly Attachment[], name: (number: number) => string): string {
  const names = new Set(attachments.map((one) => one.name));
  let number = 1;
  while (names.has(name(number))) number++;
  return name(number);
}
