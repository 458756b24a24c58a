import { memo } from "preact/compat";
import { shown } from "./visible";

const PART = 4_000; // characters

/** A text of any length as it is, in parts, of which the browser lays out only those in view. */
export function Plain({ text }: { text: string }) {
  return (
    <>
      {parts(text).map((part, index) => (
        <Part key={index} text={part} />
      ))}
    </>
  );
}

const Part = memo(({ text }: { text: string }) => <span class="part">{shown(text)}</span>);

/** Cut behind a line's end where there is one, or else anywhere: no screen holds such a line. */
export function parts(text: string): string[] {
  const found: string[] = [];
  for (let start = 0; start < text.length; ) {
    let end = Math.min(text.length, start + PART);
    if (end < text.length) {
      const line = text.slice(start, end).lastIndexOf("\n");
      if (line >= 0) end = start + line + 1;
      else if (/[\uD800-\uDBFF]/.test(text[end - 1]!)) end--; // the first half of a character
    }
    // Each part is a block of its own: the line's end behind it would be an empty line.
    found.push(end < text.length || text[end - 1] !== "\n" ? text.slice(start, end).replace(/\n$/, "") : text.slice(start, end));
    start = end;
  }
  return found;
}
