import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { labels } from "../text";
import { Copy } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import type { highlight } from "./highlight";
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
  const [isPreviewed, setPreviewed] = useState(false);
  const tree = isColored && ready ? loaded?.(language, text) : null;
  return (
    <div class="code">
      <div class="code-head">
        <span>{language || labels.value.markdown.text}</span>
        {preview !== null && (
          <button class="quiet small" type="button" aria-pressed={isPreviewed} onClick={() => setPreviewed(!isPreviewed)}>
            <Icon name="eye" /> {labels.value.markdown.preview}
          </button>
        )}
        <Copy text={text} />
      </div>
      {preview !== null && isPreviewed && <Preview key={preview} content={preview} />}
      <pre tabIndex={0}>
        <code>{tree ? renderHighlighted(tree) : <Plain text={text} />}</code>
      </pre>
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
