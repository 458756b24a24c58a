import type { ComponentChildren } from "preact";

/** Key figures, side by side. */
export function Figures({ label, children }: { label: string; children: ComponentChildren }) {
  return (
    <dl class="figures" aria-label={label}>
      {children}
    </dl>
  );
}

interface Props {
  title: string;
  value: string;
  more?: ComponentChildren;
  kind?: string;
}

export function Figure({ title, value, more, kind = "" }: Props) {
  return (
    <div class={`figure ${kind}`}>
      <dt>{title}</dt>
      <dd>
        <strong>{value}</strong> {more}
      </dd>
    </div>
  );
}
