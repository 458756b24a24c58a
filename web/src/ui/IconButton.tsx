import type { ReadonlySignal } from "@preact/signals";
import { Icon, type IconName } from "./Icon";

interface Props {
  icon: IconName;
  /** Action, for screen readers and as a tooltip. */
  label: string;
  onClick: () => void;
  /** A signal changes the button alone, without rendering anything. */
  disabled?: boolean | ReadonlySignal<boolean>;
  pressed?: boolean;
  expanded?: boolean;
  kind?: string;
  /** Show the label beside the icon. */
  hasWord?: boolean;
}

/** A button with an icon. */
export function IconButton({ icon, label, onClick, disabled = false, pressed, expanded, kind = "", hasWord = false }: Props) {
  return (
    <button
      class={`quiet ${hasWord ? "small" : "pictured"} ${kind}`}
      type="button"
      title={label}
      aria-label={label}
      aria-pressed={pressed}
      aria-expanded={expanded}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon name={icon} />
      {hasWord && <span> {label}</span>}
    </button>
  );
}
