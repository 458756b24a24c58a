// Which view is shown: the part of the address behind "#", so that every view has an address of its own.
import { signal } from "@preact/signals";

function parse(): string[] {
  return location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
}

/** The address by its parts: the view's name, then what the view makes of the rest. */
export const route = signal<string[]>(parse());

addEventListener("hashchange", () => {
  route.value = parse();
});

export function address(...parts: string[]): string {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

export function go(...parts: string[]): void {
  location.hash = address(...parts);
}
