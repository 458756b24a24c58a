import { useEffect, useRef } from "preact/hooks";

/** A TeX formula as MathML; invalid TeX is shown as text. The TeX library is loaded on first use. */
export function Formula({ tex, display }: { tex: string; display: boolean }) {
  const place = useRef<HTMLSpanElement>(null);
  useEffect(() => {
    let isCurrent = true;
    void import("./tex").then(({ temml }) => {
      if (!isCurrent || !place.current) return;
      try {
        temml.render(tex, place.current, { displayMode: display, trust: false, throwOnError: true, maxExpand: 200 });
      } catch {
        place.current.textContent = tex;
      }
    });
    return () => {
      isCurrent = false;
    };
  }, [tex, display]);
  return (
    <span class={display ? "formula display" : "formula"}>
      <span ref={place}>{tex}</span>
    </span>
  );
}
