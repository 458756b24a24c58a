// Routing: the URL fragment names the view, so that every view has its own address.
import { signal } from "@preact/signals";

function parse(): string[] {
  return location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
}

/** Parts of the fragment: the name of the view, then the view's own parts. */
export const route = signal<string[]>(parse());

/** Last address of each view. */
const lastAddresses = new Map<string, string[]>();

function read(): void {
  const found = parse();
  const before = route.peek();
  if (found.join("/") === before.join("/")) return;
  lastAddresses.set(before[0] || "chat", before);
  route.value = found;
}

/** Return the address of a view as the user left it, such as the chat that was open. */
export function addressOf(view: string): string {
  const now = route.value;
  const parts = (now[0] || "chat") === view ? now : (lastAddresses.get(view) ?? []);
  return address(view, ...parts.slice(1));
}

addEventListener("hashchange", read); // typed, or the back button

// Follow links at once: keys pressed after a click must reach the new view.
addEventListener("click", (event) => {
  const { button, altKey, ctrlKey, metaKey, shiftKey, target } = event;
  const link = (target as Element).closest<HTMLAnchorElement>('a[href^="#/"]');
  if (!link || button || altKey || ctrlKey || metaKey || shiftKey || event.defaultPrevented) return;
  event.preventDefault();
  follow(link.hash);
});

function follow(hash: string): void {
  if (hash !== location.hash) history.pushState(null, "", hash);
  read();
}

export function address(...parts: string[]): string {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

export function navigate(...parts: string[]): void {
  follow(address(...parts));
}
