import { useEffect, useRef } from "preact/hooks";

/** A TeX formula as MathML; what cannot be read is shown as it was written. The reader of TeX is loaded on first use. */
export function Formula({ tex, display }: { tex: string; display: boolean }) {
  const place = useRef<HTMLSpanElement>(null);
  useEffect(() => {
    let wanted = true;
    void import("temml").then(({ default: temml }) => {
      if (!wanted || !place.current) return;
      try {
        temml.render(tex, place.current, { displayMode: display, trust: false, throwOnError: true, maxExpand: 200 });
      } catch {
        place.current.textContent = tex;
      }
    });
    return () => {
      wanted = false;
    };
  }, [tex, display]);
  return (
    <span class={display ? "formula display" : "formula"}>
      <span ref={place}>{tex}</span>
    </span>
  );
}
