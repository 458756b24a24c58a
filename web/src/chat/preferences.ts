// Preferences of the user for all chats.
import { persistentSignal } from "../ui/persistent";

export interface Preferences {
  /** Number of answers to a question, from which the user chooses. */
  answers: number;
  /** Pasted texts of this length or more become an attachment, in characters; 0: never. */
  pasteLimit: number;
  /** True if the model names new chats. */
  titles: boolean;
}

const DEFAULTS: Preferences = { answers: 1, pasteLimit: 2500, titles: true };

export const preferences = persistentSignal<Preferences>("preferences", DEFAULTS);
preferences.value = { ...DEFAULTS, ...preferences.value };

export function changePreferences(changes: Partial<Preferences>): void {
  preferences.value = { ...preferences.value, ...changes };
}
