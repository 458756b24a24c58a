import { modelFor, models, refresh } from "../api/server";
import { shown } from "../markdown/visible";

interface Given {
  /** What was chosen; "": nothing was. */
  chosen: string;
  onChoose: (model: string) => void;
  label?: string;
}

/** Which of the server's models is asked; nothing where there is only one. */
export function ModelPicker({ chosen, onChoose, label = "Model" }: Given) {
  if (models.value.length < 2) return null;
  return (
    <select
      class="model-picker"
      aria-label={label}
      value={modelFor(chosen)}
      onFocus={() => void refresh()}
      onChange={(event) => onChoose(event.currentTarget.value)}
    >
      {models.value.map((one) => (
        <option key={one.id} value={one.id}>
          {shown(one.id)}
          {one.status && one.status.value !== "loaded" ? ` (${one.status.value})` : ""}
        </option>
      ))}
    </select>
  );
}
