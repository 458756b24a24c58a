// The text of a PDF; the reader is loaded with the first one.
import * as pdf from "pdfjs-dist";
import { scriptUrl } from "../shell/trusted";
import worker from "pdfjs-dist/build/pdf.worker.min.mjs?url";

/** Throws an Error for a file that is no PDF, is locked, or holds pictures alone. */
export async function textOfPdf(bytes: ArrayBuffer): Promise<string> {
  const port = new Worker(scriptUrl(new URL(worker, import.meta.url).href), { type: "module" });
  pdf.GlobalWorkerOptions.workerPort = port;
  const task = pdf.getDocument({
    data: bytes,
    isEvalSupported: false,
    useSystemFonts: false,
    disableFontFace: true,
  });
  try {
    const document = await task.promise;
    const pages: string[] = [];
    for (let number = 1; number <= document.numPages; number++) {
      const content = await (await document.getPage(number)).getTextContent();
      const lines = content.items.map((item) => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : ""));
      pages.push(lines.join("").trim());
    }
    const text = pages.filter(Boolean).join("\n\n");
    if (!text) throw new Error("this PDF holds pictures, no text");
    return text;
  } finally {
    await task.destroy();
    port.terminate();
  }
}
