// Text of a PDF. The PDF library is loaded with the first file.
import * as pdf from "pdfjs-dist";
import { scriptUrl } from "../shell/trusted";
import { labels } from "../text";
import worker from "pdfjs-dist/build/pdf.worker.min.mjs?url";

/** Return the text. Throws an Error if the file is no PDF, is locked, or has images only. */
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
    if (!text) throw new Error(labels.value.chat.pdfWithoutText);
    return text;
  } finally {
    await task.destroy();
    port.terminate();
  }
}
