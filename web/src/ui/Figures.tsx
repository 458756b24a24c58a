import type { ComponentChildren } from "preact";

/** Numbers that people look for first, side by side. */
export function Figures({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <dl class="figures" aria-label={label}>
      {children}
    </dl>
  );
}

interface Given {
  title: string;
  value: string;
  more?: ComponentChildren;
  kind?: string;
}

export function Figure({ title, value, more, kind = "" }: Given) {
  return (
    <div class={`figure ${kind}`}>
      <dt>{title}</dt>
      <dd>
        <strong>{value}</strong> {more}
      </dd>
    </div>
  );
}
