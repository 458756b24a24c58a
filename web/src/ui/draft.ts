// What is being typed into a field.
import { useState } from "preact/hooks";

/**
 * Properties of a field whose text stays as it is typed until the field is left, whatever is drawn meanwhile. `take` gets it
 * with each key; where that returns false, the text stays beyond that.
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
