import { useRef, useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { Icon, type IconName } from "./Icon";
import { IconButton } from "./IconButton";

export interface MenuItem {
  icon: IconName;
  label: string;
  run: () => void;
  disabled?: boolean;
}

const GAP = 4; // pixels

/** A button that opens a menu: arrow keys move, Enter chooses, Escape closes. */
export function Menu({ icon, label, items }: { icon: IconName; label: string; items: readonly MenuItem[] }) {
  const place = useRef<HTMLSpanElement>(null);
  const popup = useRef<HTMLDivElement>(null);
  const [isOpen, setOpen] = useState(false);
  const button = () => place.current!.querySelector("button")!;

  function open() {
    popup.current!.showPopover();
    const { left, bottom, top } = button().getBoundingClientRect();
    const { offsetWidth, offsetHeight, style } = popup.current!;
    style.left = `${Math.max(GAP, Math.min(left, innerWidth - offsetWidth - GAP))}px`;
    style.top = `${bottom + offsetHeight + GAP > innerHeight ? Math.max(GAP, top - offsetHeight) : bottom}px`;
    focusItem(0);
  }

  function focusItem(step: number) {
    const all = [...popup.current!.querySelectorAll<HTMLElement>("button:not(:disabled)")];
    const at = all.indexOf(document.activeElement as HTMLElement);
    all[(Math.max(0, at) + step + all.length) % all.length]?.focus();
  }

  return (
    <span ref={place} class="menu-place">
      <IconButton icon={icon} label={label} expanded={isOpen} onClick={() => (isOpen ? popup.current!.hidePopover() : open())} />
      <div
        ref={popup}
        popover="auto"
        class="menu-popup"
        role="menu"
        aria-label={label}
        onToggle={(event) => setOpen(event.newState === "open")}
        onKeyDown={(event) => {
          const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
          if (step) event.preventDefault(), focusItem(step);
          else if (event.key === "Tab") popup.current!.hidePopover();
        }}
      >
        {items.map((one) => (
          <button
            key={one.label}
            class="quiet"
            type="button"
            role="menuitem"
            tabIndex={-1}
            disabled={one.disabled}
            onClick={() => {
              popup.current!.hidePopover();
              button().focus();
              one.run();
            }}
          >
            <Icon name={one.icon} /> {displayText(one.label)}
          </button>
        ))}
      </div>
    </span>
  );
}
