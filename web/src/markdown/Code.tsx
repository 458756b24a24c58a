import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Copy } from "../ui/Copy";
import type { highlight } from "./highlight";
import { Plain } from "./Plain";
import { shown } from "./visible";

/** Above this many characters code is not coloured. */
const COLOURED_TO = 20_000;

let loaded: typeof highlight | undefined;
let loading: Promise<void> | undefined;

function load(): Promise<void> {
  loading ??= import("./highlight").then((module) => {
    loaded = module.highlight;
  });
  return loading;
}

/** A code block, coloured once it does not grow any more. */
export function Code({ text, language, settled }: { text: string; language: string; settled: boolean }) {
  const [ready, setReady] = useState(loaded !== undefined);
  const wanted = settled && language !== "" && text.length <= COLOURED_TO;
  useEffect(() => {
    if (wanted && !ready) void load().then(() => setReady(true), () => undefined);
  }, [wanted, ready]);
  const tree = wanted && ready ? loaded?.(language, text) : null;
  return (
    <div class="code">
      <div class="code-head">
        <span>{language || "text"}</span>
        <Copy text={text} />
      </div>
      <pre tabIndex={0}>
        <code>{tree ? coloured(tree) : <Plain text={text} />}</code>
      </pre>
    </div>
  );
}

type Node = NonNullable<ReturnType<typeof highlight>> | NonNullable<ReturnType<typeof highlight>>["children"][number];

function coloured(node: Node): ComponentChildren {
  if (node.type === "text") return shown(node.value);
  if (!("children" in node)) return null;
  const children = node.children.map((child) => coloured(child));
  if (node.type !== "element") return children;
  const names = node.properties.className;
  return <span class={Array.isArray(names) ? names.join(" ") : ""}>{children}</span>;
}
