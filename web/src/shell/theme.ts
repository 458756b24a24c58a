// Color theme: dark or light, as the system or the user chose.
import { effect, signal } from "@preact/signals";
import { persistentSignal } from "../ui/persistent";

export type Theme = "system" | "light" | "dark";

export const theme = persistentSignal<Theme>("theme", "system");

effect(() => {
  document.documentElement.style.colorScheme = theme.value === "system" ? "light dark" : theme.value;
});

const query = matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(query.matches);
query.addEventListener("change", () => {
  systemIsDark.value = query.matches;
});

/** Return true if dark colors are active, for elements that CSS cannot color, such as a canvas. */
export function isDark(): boolean {
  return theme.value === "dark" || (theme.value === "system" && systemIsDark.value);
}
