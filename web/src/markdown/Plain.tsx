import { memo } from "preact/compat";
import { displayText } from "./displayText";

const PART = 4_000; // characters

/** Plain text of any length, in parts, of which the browser lays out only the visible ones. */
export function Plain({ text }: { text: string }) {
  return (
    <>
      {parts(text).map((part, index) => (
        <Part key={index} text={part} />
      ))}
    </>
  );
}

const Part = memo(({ text }: { text: string }) => <span class="part">{displayText(text)}</span>);

/** Split a text after line breaks, or anywhere in lines that are too long for a part. */
export function parts(text: string): string[] {
  const found: string[] = [];
  for (let start = 0; start < text.length; ) {
    let end = Math.min(text.length, start + PART);
    if (end < text.length) {
      const line = text.slice(start, end).lastIndexOf("\n");
      if (line >= 0) end = start + line + 1;
      else if (/[\uD800-\uDBFF]/.test(text[end - 1]!)) end--; // the first half of a surrogate pair
    }
    // Each part is a block element: a line break at its end would show an empty line.
    found.push(end < text.length || text[end - 1] !== "\n" ? text.slice(start, end).replace(/\n$/, "") : text.slice(start, end));
    start = end;
  }
  return found;
}
