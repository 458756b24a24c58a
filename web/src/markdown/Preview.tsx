// Preview of HTML and SVG. The code runs in a frame without an origin, whose document forbids all requests
// (public/preview.html).
import { labels } from "../text";

const SVG_STYLE = "<!doctype html><style>body{margin:8px}svg{max-width:100%;height:auto}</style>";

/** Return the document that shows the code; null if it is neither HTML nor SVG. */
export function previewOf(language: string, text: string): string | null {
  const name = language.toLowerCase();
  if (name === "html" || name === "htm") return text;
  const isSvg = name === "svg" || (name === "xml" && /<svg[\s>]/.test(text));
  return isSvg ? `${SVG_STYLE}${text.replace(/<\?xml[^>]*\?>|<!DOCTYPE[^>]*>/gi, "")}` : null;
}

/** A frame that shows a document. */
export function Preview({ content }: { content: string }) {
  let isSent = false;
  return (
    <iframe
      class="preview"
      sandbox="allow-scripts"
      src="./preview.html"
      title={labels.value.markdown.previewFrame}
      onLoad={({ currentTarget }) => {
        // The frame has no origin that could be named here. Only the first document, which is ours, gets the code.
        if (!isSent) currentTarget.contentWindow?.postMessage(content, "*");
        isSent = true;
      }}
    />
  );
}
