// Dark or light: as the system has it, or as chosen here.
import { effect, signal } from "@preact/signals";
import { remembered } from "../ui/remembered";

export type Theme = "system" | "light" | "dark";

export const theme = remembered<Theme>("theme", "system");

effect(() => {
  document.documentElement.style.colorScheme = theme.value === "system" ? "light dark" : theme.value;
});

const query = matchMedia("(prefers-color-scheme: dark)");
const systemIsDark = signal(query.matches);
query.addEventListener("change", () => {
  systemIsDark.value = query.matches;
});

/** Whether dark colours are shown now; for what CSS cannot colour, such as a canvas. */
export function isDark(): boolean {
  return theme.value === "dark" || (theme.value === "system" && systemIsDark.value);
}
