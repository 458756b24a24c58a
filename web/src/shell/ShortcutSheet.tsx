import { useEffect, useRef } from "preact/hooks";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { isHelpOpen } from "./shortcuts";

const IS_MAC = /Mac|iPhone|iPad/.test(navigator.userAgent);

/** Keys of the page, and what they do. The labels have the effects in the same order. */
const KEYS = [
  ["Ctrl+K", "search"],
  ["Ctrl+Shift+O", "newChat"],
  ["Ctrl+Shift+S", "list"],
  ["Ctrl+.", "settings"],
  ["Alt+ArrowUp", "previousChat"],
  ["Alt+ArrowDown", "nextChat"],
  ["Ctrl+Shift+Backspace", "deleteChat"],
  ["Shift+Escape", "focusMessage"],
  ["Enter", "send"],
  ["Shift+Enter", "newLine"],
  ["Escape", "stop"],
  ["ArrowUp", "editLast"],
  ["/", "prompts"],
  ["Ctrl+Enter", "saveEdit"],
  ["?", "help"],
] as const;

const SYMBOLS: Partial<Record<string, string>> = { ArrowUp: "↑", ArrowDown: "↓", Escape: "Esc" };

function symbol(key: string): string {
  return key === "Ctrl" && IS_MAC ? "⌘" : (SYMBOLS[key] ?? key);
}

/** All keyboard shortcuts. */
export function ShortcutSheet() {
  const t = labels.value.shortcuts;
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} class="shortcuts" aria-labelledby="shortcuts-title" onClose={() => (isHelpOpen.value = false)}>
      <div class="row">
        <h2 id="shortcuts-title">{t.title}</h2>
        <button class="quiet pictured" type="button" aria-label={labels.value.common.close} onClick={() => dialog.current?.close()}>
          <Icon name="close" />
        </button>
      </div>
      <dl>
        {KEYS.map(([keys, effect]) => (
          <div key={keys}>
            <dt>
              {keys.split("+").map((key) => (
                <kbd key={key}>{symbol(key)}</kbd>
              ))}
            </dt>
            <dd>{t.effects[effect]}</dd>
          </div>
        ))}
      </dl>
    </dialog>
  );
}
