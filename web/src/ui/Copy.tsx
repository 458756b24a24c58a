import { useState } from "preact/hooks";
import { Icon } from "./Icon";

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

/** Copies a text; `bare`: without a word beside the picture. */
export function Copy({ text, bare = false }: { text: string; bare?: boolean }) {
  const [said, setSaid] = useState("");
  async function run() {
    setSaid((await copy(text)) ? "Copied" : "Not copied");
    setTimeout(() => setSaid(""), 1500);
  }
  return (
    <button class={`quiet ${bare ? "pictured" : "small"}`} type="button" title="Copy" onClick={() => void run()}>
      <Icon name={said === "Copied" ? "check" : said ? "close" : "copy"} />
      <span class={bare ? "hidden" : ""}> {said || "Copy"}</span>
    </button>
  );
}
