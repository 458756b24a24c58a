// Labels of the page in the current language. English is always loaded; other languages are loaded when they are chosen.
import { effect, signal } from "@preact/signals";
import { en } from "./en";
import { type Language, language } from "./language";

/** All labels of one language; functions insert values. */
export type Catalogue = typeof en;

export const labels = signal<Catalogue>(en);

/** Functions that load the catalogues. */
export const LOADERS: Record<Language, () => Promise<Catalogue>> = {
  en: async () => en,
  de: async () => (await import("./de")).de,
  es: async () => (await import("./es")).es,
  zh: async () => (await import("./zh")).zh,
};

/** Show the labels of a language. If they cannot be loaded, the present ones stay. */
async function show(wanted: Language): Promise<void> {
  const found = await LOADERS[wanted]().catch(() => null);
  if (!found || wanted !== language.value) return;
  labels.value = found;
  document.documentElement.lang = wanted === "zh" ? "zh-Hans" : wanted;
}

/** Follow the language from now on. Resolves once the labels of the present language are shown. */
export function followLanguage(): Promise<void> {
  let shown = Promise.resolve();
  effect(() => {
    shown = show(language.value);
  });
  return shown;
}
