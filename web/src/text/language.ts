// The language of the page: the browser's, or the one that the user chose.
import { computed } from "@preact/signals";
import { persistentSignal } from "../ui/persistent";

/** Languages with a catalogue of labels, by their own names. */
export const LANGUAGES = { en: "English", de: "Deutsch", es: "Español", zh: "简体中文" } as const;
export type Language = keyof typeof LANGUAGES;

/** "system": the browser's language. */
export const chosenLanguage = persistentSignal<Language | "system">("language", "system");

function isLanguage(name: string): name is Language {
  return Object.hasOwn(LANGUAGES, name);
}

/** Return the first of the browser's languages that the page has; English if it has none. */
function browserLanguage(): Language {
  const preferred = globalThis.navigator?.languages ?? [];
  return preferred.map((tag) => tag.slice(0, 2).toLowerCase()).find(isLanguage) ?? "en";
}

export const language = computed<Language>(() => (isLanguage(chosenLanguage.value) ? chosenLanguage.value : browserLanguage()));
