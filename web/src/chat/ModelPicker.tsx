import { modelFor, models, props, refreshProps } from "../api/server";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";

interface Props {
  /** The chosen model; "" if none was chosen. */
  chosen: string;
  onChoose: (model: string) => void;
  label?: string;
}

/** Selects one of the server's models; hidden if there is only one. */
export function ModelPicker({ chosen, onChoose, label = labels.value.common.model }: Props) {
  if (models.value.length < 2) return null;
  return (
    <select
      class="model-picker"
      aria-label={label}
      value={modelFor(chosen)}
      onFocus={() => void refreshProps()}
      onChange={(event) => onChoose(event.currentTarget.value)}
    >
      {models.value.map((one) => (
        <option key={one.id} value={one.id}>
          {displayText(one.id)}
          {one.status && one.status.value !== "loaded" ? ` (${labels.value.common.modelState[one.status.value] ?? one.status.value})` : ""}
        </option>
      ))}
    </select>
  );
}

/** The model of a chat: its name, or a list if there are several. */
export function ModelSwitcher(settings: Props) {
  if (models.value.length > 1) return <ModelPicker {...settings} />;
  const name = props.value.model_alias;
  return name ? <span class="model-name">{displayText(name)}</span> : null;
}
