// Prompt library: saved texts that the user inserts into messages by name.
import { signal } from "@preact/signals";
import { type Named, withNamed, withoutName } from "../ui/named";
import { persistentSignal } from "../ui/persistent";

export interface SavedPrompt extends Named {
  text: string;
}

export const prompts = persistentSignal<readonly SavedPrompt[]>("prompts", []);
export const isLibraryOpen = signal(false);

/** Replace a prompt, or add one if `before` is undefined. A prompt with the same name is replaced too. */
export function savePrompt(before: string | undefined, prompt: SavedPrompt): void {
  prompts.value = withNamed(before === undefined ? prompts.value : withoutName(prompts.value, before), prompt);
}

export function removePrompt(name: string): void {
  prompts.value = withoutName(prompts.value, name);
}

/** Return the prompts whose name contains what follows the slash in a draft such as "/tra"; none for other drafts. */
export function suggestPrompts(draft: string): SavedPrompt[] {
  const typed = /^\/([^\n]{0,40})$/.exec(draft)?.[1]?.toLocaleLowerCase();
  if (typed === undefined) return [];
  return prompts.value.filter((one) => one.name.toLocaleLowerCase().includes(typed));
}
