// Characters that change the order of what is read are shown by name: text that looks otherwise than it is deceives.
import type { ComponentChildren } from "preact";

const HIDDEN = /[\u202A-\u202E\u2066-\u2069]/;
const EACH = /([\u202A-\u202E\u2066-\u2069])/;

export function shown(text: string): ComponentChildren {
  if (!HIDDEN.test(text)) return text;
  return text.split(EACH).map((part, index) =>
    HIDDEN.test(part) ? (
      <span key={index} class="control" title="a character that changes the direction of the text">
        U+{part.codePointAt(0)!.toString(16).toUpperCase()}
      </span>
    ) : (
      part
    ),
  );
}
