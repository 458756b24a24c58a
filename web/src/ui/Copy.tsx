import { useState } from "preact/hooks";

/** Puts a text into the clipboard; where the browser allows that only to pages of HTTPS, by way of a selection. */
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

export function Copy({ text, label = "Copy" }: { text: string; label?: string }) {
  const [said, setSaid] = useState("");
  async function run() {
    setSaid((await copy(text)) ? "Copied" : "Not copied");
    setTimeout(() => setSaid(""), 1500);
  }
  return (
    <button class="quiet small" type="button" onClick={() => void run()}>
      {said || label}
    </button>
  );
}
