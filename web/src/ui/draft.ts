// Text while the user edits a field.
import { useState } from "preact/hooks";

/**
 * Return properties of a field that keeps the typed text until the user leaves it, whatever is rendered meanwhile. `take`
 * gets the text after each key; if it returns false, the text stays in the field afterwards too.
 */
export function useDraft(value: string | number, take: (text: string) => boolean | void) {
  const [typed, setTyped] = useState<{ text: string; taken: boolean } | null>(null);
  return {
    value: typed?.text ?? value,
    onInput: (event: { currentTarget: { value: string } }) => {
      const text = event.currentTarget.value;
      setTyped({ text, taken: take(text) !== false });
    },
    onBlur: () => {
      if (typed?.taken) setTyped(null);
    },
  };
}
