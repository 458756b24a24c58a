import { useEffect, useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { draftChanges, draftText } from "./drafts";
import { type SavedPrompt, suggestPrompts } from "./prompts";

interface Suggestions {
  found: readonly SavedPrompt[];
  /** Index of the suggestion that Enter inserts. */
  chosen: number;
  /** Handle a key of the field; returns true if the suggestions used it. */
  handleKey: (event: KeyboardEvent) => boolean;
}

/** Suggest saved prompts for a draft that starts with a slash. */
export function usePromptSuggestions(place: string, onInsert: (prompt: SavedPrompt) => void): Suggestions {
  const [at, setAt] = useState(0);
  const [closedFor, setClosedFor] = useState("");
  void draftChanges.value;
  const text = draftText(place);
  const found = text === closedFor ? [] : suggestPrompts(text);
  useEffect(() => setAt(0), [text]);
  const chosen = Math.min(at, found.length - 1);

  function handleKey(event: KeyboardEvent): boolean {
    const { key } = event;
    if (!found.length || event.isComposing) return false;
    if (key === "ArrowDown" || key === "ArrowUp") setAt((chosen + (key === "ArrowDown" ? 1 : found.length - 1)) % found.length);
    else if ((key === "Enter" && !event.shiftKey) || key === "Tab") onInsert(found[chosen]!);
    else if (key === "Escape") setClosedFor(text);
    else return false;
    event.preventDefault();
    return true;
  }
  return { found, chosen, handleKey };
}

export const suggestionId = (index: number) => `prompt-${index}`;

interface Props {
  suggestions: Suggestions;
  onInsert: (prompt: SavedPrompt) => void;
}

export function PromptSuggestions({ suggestions: { found, chosen }, onInsert }: Props) {
  if (!found.length) return null;
  return (
    <ul id="prompts" class="prompt-suggestions" role="listbox" aria-label={labels.value.prompts.title}>
      {found.map((one, index) => (
        <li
          key={one.name}
          id={suggestionId(index)}
          role="option"
          aria-selected={index === chosen}
          onPointerDown={(event) => (event.preventDefault(), onInsert(one))}
        >
          <b>/{displayText(one.name)}</b> <span>{displayText(one.text.slice(0, 120))}</span>
        </li>
      ))}
    </ul>
  );
}
