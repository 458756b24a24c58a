import { useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { IconButton } from "../ui/IconButton";
import { presets, removePreset, savePreset } from "./presets";
import type { Settings } from "./settings";

interface Props {
  settings: Settings;
  onChoose: (settings: Settings) => void;
}

/** Selects, saves and deletes presets. */
export function PresetPicker({ settings, onChoose }: Props) {
  const t = labels.value.presets;
  const [typed, setTyped] = useState<string | null>(null);
  const now = JSON.stringify(settings);
  const chosen = presets.value.find((one) => JSON.stringify(one.settings) === now)?.name ?? "";

  function save(event: Event) {
    event.preventDefault();
    const name = typed?.trim();
    if (name) savePreset(name, settings);
    setTyped(null);
  }

  if (typed !== null) {
    return (
      <form class="row preset" onSubmit={save} onKeyDown={(event) => event.key === "Escape" && setTyped(null)}>
        <input
          type="text"
          aria-label={t.name}
          placeholder={t.name}
          ref={(field) => field?.focus()}
          value={typed}
          onInput={(event) => setTyped(event.currentTarget.value)}
        />
        <button class="primary" type="submit">
          {labels.value.common.save}
        </button>
      </form>
    );
  }
  return (
    <div class="row preset">
      <select
        aria-label={t.title}
        value={chosen}
        onChange={(event) => {
          const preset = presets.value.find((one) => one.name === event.currentTarget.value);
          if (preset) onChoose(preset.settings);
        }}
      >
        <option value="">{t.none}</option>
        {presets.value.map((one) => (
          <option key={one.name} value={one.name}>
            {displayText(one.name)}
          </option>
        ))}
      </select>
      <IconButton icon="plus" label={t.save} onClick={() => setTyped(chosen)} />
      <IconButton icon="trash" label={t.remove} disabled={!chosen} onClick={() => removePreset(chosen)} />
    </div>
  );
}
