import { useState } from "preact/hooks";
import { labels } from "../text";
import { Icon } from "./Icon";

/** Copy a text to the clipboard. Without HTTPS browsers forbid the clipboard API, so a selection is copied instead. */
export async function copy(text: string): Promise<boolean> {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // not allowed; the older way may be
    }
  }
  const field = document.createElement("textarea");
  field.value = text;
  field.style.position = "fixed";
  field.style.opacity = "0";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}

/** A button that copies a text. */
export function Copy({ text }: { text: string }) {
  const t = labels.value.common;
  const [status, setStatus] = useState<"copy" | "copied" | "notCopied">("copy");
  async function run() {
    setStatus((await copy(text)) ? "copied" : "notCopied");
    setTimeout(() => setStatus("copy"), 1500);
  }
  return (
    <button class="quiet small" type="button" title={t.copy} onClick={() => void run()}>
      <Icon name={({ copy: "copy", copied: "check", notCopied: "close" } as const)[status]} />
      <span> {t[status]}</span>
    </button>
  );
}
