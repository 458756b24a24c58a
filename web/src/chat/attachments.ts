// Files as text: a model reads nothing else.
import type { Attachment } from "./tree";

const LARGEST_TEXT = 2_000_000; // bytes
const LARGEST_PDF = 50_000_000;

/** Throws an Error that says what is wrong with the file. */
export async function readAttachment(file: File): Promise<Attachment> {
  const isPdf = file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf");
  const most = isPdf ? LARGEST_PDF : LARGEST_TEXT;
  if (file.size > most) throw new Error(`larger than ${most / 1e6} MB`);
  const bytes = await file.arrayBuffer();
  if (isPdf) {
    const { textOfPdf } = await import("./pdf");
    return { name: file.name, text: await textOfPdf(bytes) };
  }
  let text: string;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("this is no text (UTF-8) and no PDF");
  }
  if (text.includes("\0")) throw new Error("this is no text and no PDF");
  return { name: file.name, text };
}
