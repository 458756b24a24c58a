// Which view is shown: the part of the address behind "#", so that every view has an address of its own.
import { signal } from "@preact/signals";

function parse(): string[] {
  return location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
}

/** The address by its parts: the view's name, then what the view makes of the rest. */
export const route = signal<string[]>(parse());

/** Addresses that views were left at. */
const left = new Map<string, string[]>();

function read(): void {
  const found = parse();
  const before = route.peek();
  if (found.join("/") === before.join("/")) return;
  left.set(before[0] || "chat", before);
  route.value = found;
}

/** The address that leads back to a view as it was left: the chat that was open. */
export function addressOf(view: string): string {
  const now = route.value;
  const parts = (now[0] || "chat") === view ? now : (left.get(view) ?? []);
  return address(view, ...parts.slice(1));
}

addEventListener("hashchange", read); // typed, or one step back

// Links are followed at once: what is typed behind a click must find the view that was asked for.
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

export function go(...parts: string[]): void {
  follow(address(...parts));
}
