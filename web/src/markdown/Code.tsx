import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { labels } from "../text";
import { Copy } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import type { highlight } from "./highlight";
import { Diagram, isDiagram } from "./Diagram";
import { Plain } from "./Plain";
import { displayText } from "./displayText";
import { Preview, previewOf } from "./Preview";

/** Longer code is not colored, in characters. */
const MAX_COLORED = 20_000;

let loaded: typeof highlight | undefined;
let loading: Promise<void> | undefined;

function load(): Promise<void> {
  loading ??= import("./highlight").then((module) => {
    loaded = module.highlight;
  });
  return loading;
}

/** A code block, colored once it is complete. */
export function Code({ text, language, isComplete }: { text: string; language: string; isComplete: boolean }) {
  const [ready, setReady] = useState(loaded !== undefined);
  const isColored = isComplete && language !== "" && text.length <= MAX_COLORED;
  useEffect(() => {
    if (isColored && !ready) void load().then(() => setReady(true), () => undefined);
  }, [isColored, ready]);
  const preview = isComplete ? previewOf(language, text) : null;
  const hasDiagram = isComplete && isDiagram(language);
  const [choice, setChoice] = useState<boolean>();
  const isShown = choice ?? hasDiagram;
  const tree = isColored && ready ? loaded?.(language, text) : null;
  const code = (
    <pre tabIndex={0}>
      <code>{tree ? renderHighlighted(tree) : <Plain text={text} />}</code>
    </pre>
  );
  return (
    <div class="code">
      <div class="code-head">
        <span>{language || labels.value.markdown.text}</span>
        {(hasDiagram || preview !== null) && (
          <button class="quiet small" type="button" aria-pressed={isShown} onClick={() => setChoice(!isShown)}>
            <Icon name="eye" /> {hasDiagram ? labels.value.markdown.diagram : labels.value.markdown.preview}
          </button>
        )}
        <Copy text={text} />
      </div>
      {preview !== null && isShown && <Preview key={preview} content={preview} />}
      {hasDiagram && isShown ? <Diagram code={text}>{code}</Diagram> : code}
    </div>
  );
}

type Node = NonNullable<ReturnType<typeof highlight>> | NonNullable<ReturnType<typeof highlight>>["children"][number];

function renderHighlighted(node: Node): ComponentChildren {
  if (node.type === "text") return displayText(node.value);
  if (!("children" in node)) return null;
  const children = node.children.map((child) => renderHighlighted(child));
  if (node.type !== "element") return children;
  const names = node.properties.className;
  return <span class={Array.isArray(names) ? names.join(" ") : ""}>{children}</span>;
}
