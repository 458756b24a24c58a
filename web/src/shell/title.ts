// Title of the browser tab.
import { effect, signal } from "@preact/signals";

/** Title of the view, and of what it shows; "" for nothing in particular. */
export const viewTitle = signal("");
export const subject = signal("");

effect(() => {
  const title = subject.value || viewTitle.value;
  if (title) document.title = `${title} · llamado`;
});
