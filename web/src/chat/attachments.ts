// Attached files as text.
import { labels } from "../text";
import type { TextFile } from "./tree";

const MAX_TEXT = 2_000_000; // bytes
const MAX_PDF = 50_000_000;

/** Read a text file or the text of a PDF. Throws an Error that names the problem. */
export async function readAttachment(file: File): Promise<TextFile> {
  const isPdf = file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf");
  const most = isPdf ? MAX_PDF : MAX_TEXT;
  if (file.size > most) throw new Error(labels.value.chat.largerThan(most / 1e6));
  const bytes = await file.arrayBuffer();
  if (isPdf) {
    const { textOfPdf } = await import("./pdf");
    return { name: file.name, text: await textOfPdf(bytes) };
  }
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error(labels.value.chat.notTextOrPdf);
  }
  if (text.includes("\0")) throw new Error(labels.value.chat.notTextOrPdf);
  return { name: file.name, text };
}
