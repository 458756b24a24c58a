import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { isDark } from "../shell/theme";
import { labels } from "../text";
import "./diagram.css";

/** Return true for a block of Mermaid code. */
export function isDiagram(language: string): boolean {
  return language.toLowerCase() === "mermaid";
}

interface Props {
  code: string;
  /** The code block, shown until the diagram is drawn, and if it cannot be drawn. */
  children: ComponentChildren;
}

/** A Mermaid diagram as an image. The library is loaded on first use. */
export function Diagram({ code, children }: Props) {
  const t = labels.value.markdown;
  const dark = isDark();
  const [drawn, setDrawn] = useState<{ url: string; title: string } | "failed">();
  useEffect(() => {
    let isCurrent = true;
    let url = "";
    const draw = async () => {
      const { svg, title } = await (await import("./diagrams")).drawDiagram(code, dark);
      if (!isCurrent) return;
      url = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
      setDrawn({ url, title });
    };
    draw().catch(() => isCurrent && setDrawn("failed"));
    return () => {
      isCurrent = false;
      URL.revokeObjectURL(url);
    };
  }, [code, dark]);
  if (drawn === undefined || drawn === "failed") {
    return (
      <>
        {drawn && <p class="diagram-failure">{t.diagramFailed}</p>}
        {children}
      </>
    );
  }
  return (
    <div class="diagram" tabIndex={0}>
      <img src={drawn.url} alt={drawn.title || t.diagram} onError={() => setDrawn("failed")} />
    </div>
  );
}
