// Keyboard shortcuts: keys are written as the help sheet shows them, such as "Ctrl+Shift+O". On a Mac, Cmd is Ctrl.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

export const isHelpOpen = signal(false);

const TEXT_FIELD = "input:not([type=checkbox], [type=radio], [type=range]), textarea, select, [contenteditable]";

/** Return the keys of an event, as shortcuts name them. */
export function keysOf({ key, ctrlKey, metaKey, altKey, shiftKey }: KeyboardEvent): string {
  const name = key.length === 1 ? key.toUpperCase() : key;
  // "?" already needs Shift on most keyboards.
  const hasShift = shiftKey && (key.length > 1 || /\p{L}/u.test(key));
  return [(ctrlKey || metaKey) && "Ctrl", altKey && "Alt", hasShift && "Shift", name].filter(Boolean).join("+");
}

export function isTextField(target: EventTarget | null): boolean {
  return target instanceof Element && target.matches(TEXT_FIELD);
}

/** Return true if a dialog or menu is open, which has keys of its own. */
function isModal(): boolean {
  return document.querySelector("dialog[open], :popover-open") !== null;
}

/** Run functions by keys while the component is shown. Plain characters are left to text fields. */
export function useShortcuts(commands: Partial<Record<string, (event: KeyboardEvent) => void>>): void {
  useEffect(() => {
    function pressed(event: KeyboardEvent) {
      const run = event.defaultPrevented || event.isComposing || isModal() ? undefined : commands[keysOf(event)];
      if (!run || (event.key.length === 1 && !event.ctrlKey && !event.metaKey && isTextField(event.target))) return;
      event.preventDefault();
      run(event);
    }
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
}
