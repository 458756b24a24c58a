import type { ComponentChildren } from "preact";

const PARTS = /(`[^`]*`|\[[^\]]*\]\([^)]*\))/;

/** A label with `code` in backticks and [links](address). */
export function Rich({ text }: { text: string }) {
  return <>{text.split(PARTS).map(renderPart)}</>;
}

function renderPart(part: string): ComponentChildren {
  if (part.startsWith("`")) return <code>{part.slice(1, -1)}</code>;
  const link = /^\[(.*)\]\((.*)\)$/.exec(part);
  return link ? <a href={link[2]!}>{link[1]}</a> : part;
}
