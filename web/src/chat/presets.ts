// Presets: named settings, with the system prompt.
import { type Named, withNamed, withoutName } from "../ui/named";
import { persistentSignal } from "../ui/persistent";
import type { Settings } from "./settings";

export interface Preset extends Named {
  settings: Settings;
}

export const presets = persistentSignal<readonly Preset[]>("presets", []);

/** Save settings under a name, in the place of a preset with this name. */
export function savePreset(name: string, settings: Settings): void {
  presets.value = withNamed(presets.value, { name, settings });
}

export function removePreset(name: string): void {
  presets.value = withoutName(presets.value, name);
}
