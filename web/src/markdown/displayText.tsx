// Text that cannot deceive: characters that change the reading order are shown by name, and stacked marks are cut.
import type { ComponentChildren } from "preact";
import { labels } from "../text";

const HIDDEN = /[\u202A-\u202E\u2066-\u2069]/;
const EACH = /([\u202A-\u202E\u2066-\u2069])/;
const EVERY = /[\u202A-\u202E\u2066-\u2069]+/g;
/** Above this number in one text, they become U+FFFD. */
const MAX_NAMED = 200;
// No script stacks so many marks on a letter; layout of thousands takes seconds.
const HEAPS = /(\p{M}{12})\p{M}+/gu;
const HEAP = /\p{M}{13}/u;

export function displayText(text: string): ComponentChildren {
  const flat = HEAP.test(text) ? text.replace(HEAPS, "$1…") : text;
  if (!HIDDEN.test(flat)) return flat;
  const parts = flat.split(EACH, 2 * MAX_NAMED + 1);
  if (parts.length > 2 * MAX_NAMED) return flat.replace(EVERY, "\uFFFD");
  return parts.map((part, index) =>
    HIDDEN.test(part) ? (
      <span key={index} class="control" title={labels.value.markdown.directionCharacter}>
        U+{part.codePointAt(0)!.toString(16).toUpperCase()}
      </span>
    ) : (
      part
    ),
  );
}
