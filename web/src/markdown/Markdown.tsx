// Markdown as elements, made one by one: no text of a model's ever passes through innerHTML.
import { type ComponentChildren, Fragment, h } from "preact";
import { memo } from "preact/compat";
import { useMemo } from "preact/hooks";
import { Code } from "./Code";
import { Formula } from "./Formula";
import { type Block, blocks, linesOf, type Token } from "./parser";
import { Plain } from "./Plain";
import { shown } from "./visible";

/** Above these a text, or a part of it, is shown as it is: nobody reads it as a page, and laying it out takes long. */
const PLAIN_FROM = 100_000; // characters
const MOST_IN_BLOCK = 2_000; // elements
const MOST_IN_ALL = 6_000;

export function Markdown({ text, settled = true }: { text: string; settled?: boolean }) {
  const found = useMemo(() => (text.length > PLAIN_FROM ? null : blocks(text)), [text]);
  if (!found) return <pre class="plain" children={<Plain text={text} />} />;
  let all = 0;
  const full = found.findIndex((block) => (all += block.elements > MOST_IN_BLOCK ? 1 : block.elements) > MOST_IN_ALL);
  const rest = full < 0 ? "" : linesOf(text).slice(found[full]!.line).join("\n");
  return (
    <div class="markdown">
      {found.slice(0, full < 0 ? undefined : full).map((block, index) =>
        block.elements > MOST_IN_BLOCK ? (
          <pre key={index} class="plain" children={<Plain text={block.source} />} />
        ) : (
          <BlockView key={index} block={block} settled={settled || index < found.length - 1} />
        ),
      )}
      {rest && <pre key={full} class="plain" children={<Plain text={rest} />} />}
    </div>
  );
}

const BlockView = memo(
  ({ block, settled }: { block: Block; settled: boolean }) => <>{elements(block.tokens, settled)}</>,
  (before, after) => before.block.source === after.block.source && before.settled === after.settled,
);

const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote table thead tbody tr th td strong em s hr br".split(" "),
);

interface Open {
  tag: string;
  props: Record<string, unknown>;
  children: ComponentChildren[];
}

function elements(tokens: readonly Token[], settled: boolean): ComponentChildren[] {
  const root: Open = { tag: "", props: {}, children: [] };
  const stack: Open[] = [root];
  for (const token of tokens) {
    const top = stack.at(-1)!;
    if (token.nesting === 1) {
      stack.push({ tag: token.hidden ? "" : token.tag, props: properties(token), children: [] });
    } else if (token.nesting === -1) {
      if (stack.length > 1) {
        const { tag, props, children } = stack.pop()!;
        stack.at(-1)!.children.push(element(tag, props, children));
      }
    } else {
      top.children.push(leaf(token, settled));
    }
  }
  return root.children;
}

function element(tag: string, props: Record<string, unknown>, children: ComponentChildren[]): ComponentChildren {
  if (tag === "a") return h("a", props, ...children);
  if (!TAGS.has(tag)) return h(Fragment, null, ...children);
  if (tag === "table") return h("div", { class: "scroll" }, h("table", props, ...children));
  return h(tag, props, ...children);
}

function properties(token: Token): Record<string, unknown> {
  if (token.tag === "a") {
    return { href: token.attrGet("href") ?? "", target: "_blank", rel: "noopener noreferrer nofollow" };
  }
  const found: Record<string, unknown> = /^(p|h\d|li|blockquote|t[hd])$/.test(token.tag) ? { dir: "auto" } : {};
  const start = token.attrGet("start");
  if (start !== null) found["start"] = Number(start);
  const align = /text-align:(left|center|right)/.exec(String(token.attrGet("style") ?? ""));
  if (align) found["style"] = { textAlign: align[1] };
  return found;
}

function leaf(token: Token, settled: boolean): ComponentChildren {
  switch (token.type) {
    case "inline":
      return h(Fragment, null, ...elements(token.children ?? [], settled));
    case "long_table":
      return <pre class="plain" children={<Plain text={token.content} />} />;
    case "long":
      return <Plain text={token.content} />;
    case "text":
      return shown(token.content);
    case "code_inline":
      return <code>{shown(token.content)}</code>;
    case "softbreak":
    case "hardbreak":
      return <br />;
    case "hr":
      return <hr />;
    case "fence":
    case "code_block":
      return <Code text={token.content} language={token.info.trim().split(/\s+/)[0] ?? ""} settled={settled} />;
    case "math":
    case "math_block":
      return <Formula tex={token.content} display={Boolean((token.meta as { display: boolean }).display)} />;
    case "image":
      // Nothing is fetched that a model names.
      return <span class="picture">[{shown(token.content || "picture")}]</span>;
    default:
      return shown(token.content);
  }
}
