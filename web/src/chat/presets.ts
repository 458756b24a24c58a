// Presets: named settings, with the system prompt.
import { persistentSignal } from "../ui/persistent";
import type { Settings } from "./settings";

export interface Preset {
  name: string;
  settings: Settings;
}

export const presets = persistentSignal<readonly Preset[]>("presets", []);

/** Save settings under a name, in the place of a preset with this name. */
export function savePreset(name: string, settings: Settings): void {
  const others = presets.value.filter((one) => one.name !== name);
  presets.value = [...others, { name, settings }].sort((a, b) => a.name.localeCompare(b.name));
}

export function removePreset(name: string): void {
  presets.value = presets.value.filter((one) => one.name !== name);
}
