// Attached files as text.
import type { TextFile } from "./tree";

const MAX_TEXT = 2_000_000; // bytes
const MAX_PDF = 50_000_000;

/** Read a text file or the text of a PDF. Throws an Error that names the problem. */
export async function readAttachment(file: File): Promise<TextFile> {
  const isPdf = file.type === "application/pdf" || file.name.toLowerCase().endsWith(".pdf");
  const most = isPdf ? MAX_PDF : MAX_TEXT;
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
    throw new Error("not a text file (UTF-8) or PDF");
  }
  if (text.includes("\0")) throw new Error("not a text file or PDF");
  return { name: file.name, text };
}
