// Characters that deceive are shown by name: those that change the order of what is read, and heaps of marks on one letter.
import type { ComponentChildren } from "preact";

const HIDDEN = /[\u202A-\u202E\u2066-\u2069]/;
const EACH = /([\u202A-\u202E\u2066-\u2069])/;
const EVERY = /[\u202A-\u202E\u2066-\u2069]+/g;
/** More than these in one text are not named one by one. */
const MOST_NAMED = 200;
// No script puts so many on one letter; laying out thousands takes seconds.
const HEAPS = /(\p{M}{12})\p{M}+/gu;
const HEAP = /\p{M}{13}/u;

export function shown(text: string): ComponentChildren {
  const flat = HEAP.test(text) ? text.replace(HEAPS, "$1…") : text;
  if (!HIDDEN.test(flat)) return flat;
  const parts = flat.split(EACH, 2 * MOST_NAMED + 1);
  if (parts.length > 2 * MOST_NAMED) return flat.replace(EVERY, "\uFFFD");
  return parts.map((part, index) =>
    HIDDEN.test(part) ? (
      <span key={index} class="control" title="a character that changes the direction of the text">
        U+{part.codePointAt(0)!.toString(16).toUpperCase()}
      </span>
    ) : (
      part
    ),
  );
}
