import { Icon, type IconName } from "./Icon";

interface Given {
  icon: IconName;
  /** What it does, for readers of screens and as a hint. */
  label: string;
  onClick: () => void;
  disabled?: boolean;
  pressed?: boolean;
  expanded?: boolean;
  kind?: string;
}

/** A button that is a picture. */
export function IconButton({ icon, label, onClick, disabled = false, pressed, expanded, kind = "" }: Given) {
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
