// Keyboard shortcuts of the chat view.
import { navigate } from "../shell/route";
import { isTextField, keysOf, useShortcuts } from "../shell/shortcuts";
import { deleteChats } from "./chatActions";
import { orderedChats } from "./chatGroups";
import { current } from "./store";
import { useEffect } from "preact/hooks";

interface Panels {
  showList: () => void;
  toggleList: () => void;
  toggleSettings: () => void;
}

function focus(id: string): void {
  document.getElementById(id)?.focus();
}

/** Open the chat that is `step` places further down in the list. */
function openNeighbor(step: number): void {
  const all = orderedChats();
  const at = all.findIndex((one) => one.id === current.value?.id);
  const next = all[at < 0 ? 0 : at + step];
  if (next) navigate("chat", next.id);
}

function editLastQuestion(): void {
  [...document.querySelectorAll<HTMLElement>(".message.user .edit:not(:disabled)")].at(-1)?.click();
}

export function useChatKeys({ showList, toggleList, toggleSettings }: Panels): void {
  useShortcuts({
    "Ctrl+K": () => {
      showList();
      requestAnimationFrame(() => focus("search-chats"));
    },
    "Ctrl+Shift+O": () => {
      navigate("chat");
      focus("message");
    },
    "Ctrl+Shift+S": toggleList,
    "Ctrl+.": toggleSettings,
    "Alt+ArrowUp": () => openNeighbor(-1),
    "Alt+ArrowDown": () => openNeighbor(1),
    "Ctrl+Shift+Backspace": () => current.value && void deleteChats([current.value]),
    "Shift+Escape": () => focus("message"),
  });
  useEffect(() => {
    function pressed(event: KeyboardEvent) {
      const { target, key } = event;
      if (event.defaultPrevented || event.isComposing) return;
      const field = target as HTMLTextAreaElement;
      if (keysOf(event) === "ArrowUp" && field.id === "message" && !field.value) {
        event.preventDefault();
        editLastQuestion();
      } else if (isCharacter(event) && isNowhere(target) && key !== "?") {
        focus("message"); // which gets the character
      }
    }
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, []);
}

function isCharacter({ key, ctrlKey, metaKey, altKey }: KeyboardEvent): boolean {
  return key.length === 1 && key !== " " && !ctrlKey && !metaKey && !altKey;
}

/** Return true if no control has the focus that could use a character. */
function isNowhere(target: EventTarget | null): boolean {
  return !isTextField(target) && target instanceof Element && target.matches("body, main, .messages") && !document.querySelector("dialog[open]");
}
