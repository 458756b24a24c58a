import { Icon, type IconName } from "./Icon";

interface Props {
  icon: IconName;
  /** Action, for screen readers and as a tooltip. */
  label: string;
  onClick: () => void;
  disabled?: boolean;
  pressed?: boolean;
  expanded?: boolean;
  kind?: string;
}

/** A button with an icon and no text. */
export function IconButton({ icon, label, onClick, disabled = false, pressed, expanded, kind = "" }: Props) {
  return (
    <button
      class={`quiet pictured ${kind}`}
      type="button"
      title={label}
      aria-label={label}
      aria-pressed={pressed}
      aria-expanded={expanded}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon name={icon} />
    </button>
  );
}
