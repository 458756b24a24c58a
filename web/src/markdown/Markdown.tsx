// Markdown as elements. Model output never passes through innerHTML.
import { type ComponentChildren, Fragment, h } from "preact";
import { memo } from "preact/compat";
import { useMemo } from "preact/hooks";
import { labels } from "../text";
import { Code } from "./Code";
import { Formula } from "./Formula";
import { isJson } from "./json";
import { type Block, blocks, linesOf, type Token } from "./parser";
import { Plain } from "./Plain";
import { displayText } from "./displayText";

/** Larger texts and blocks are shown as plain text: layout would take too long. */
const PLAIN_FROM = 100_000; // characters
const MAX_IN_BLOCK = 2_000; // elements
const MAX_IN_ALL = 6_000;

export function Markdown({ text, isComplete = true }: { text: string; isComplete?: boolean }) {
  const json = useMemo(() => isJson(text, isComplete), [text, isComplete]);
  const found = useMemo(() => (json || text.length > PLAIN_FROM ? null : blocks(text)), [text, json]);
  if (json) return <div class="markdown" children={<Code text={text} language="json" isComplete={isComplete} />} />;
  if (!found) return <pre class="plain" children={<Plain text={text} />} />;
  let all = 0;
  const full = found.findIndex((block) => (all += block.elements > MAX_IN_BLOCK ? 1 : block.elements) > MAX_IN_ALL);
  const rest = full < 0 ? "" : linesOf(text).slice(found[full]!.line).join("\n");
  return (
    <div class="markdown">
      {found.slice(0, full < 0 ? undefined : full).map((block, index) =>
        block.elements > MAX_IN_BLOCK ? (
          <pre key={index} class="plain" children={<Plain text={block.source} />} />
        ) : (
          <BlockView key={index} block={block} isComplete={isComplete || index < found.length - 1} />
        ),
      )}
      {rest && <pre key={full} class="plain" children={<Plain text={rest} />} />}
    </div>
  );
}

const BlockView = memo(
  ({ block, isComplete }: { block: Block; isComplete: boolean }) => <>{renderTokens(block.tokens, isComplete)}</>,
  (before, after) => before.block.source === after.block.source && before.block.references === after.block.references && before.isComplete === after.isComplete,
);

const TAGS = new Set(
  "p h1 h2 h3 h4 h5 h6 ul ol li blockquote table thead tbody tr th td strong em s hr br".split(" "),
);

interface Open {
  tag: string;
  props: Record<string, unknown>;
  children: ComponentChildren[];
}

function renderTokens(tokens: readonly Token[], isComplete: boolean): ComponentChildren[] {
  const root: Open = { tag: "", props: {}, children: [] };
  const stack: Open[] = [root];
  for (const token of tokens) {
    const top = stack.at(-1)!;
    if (token.nesting === 1) {
      stack.push({ tag: token.hidden ? "" : token.tag, props: attributesOf(token), children: firstChildren(token) });
    } else if (token.nesting === -1) {
      if (stack.length > 1) {
        const { tag, props, children } = stack.pop()!;
        stack.at(-1)!.children.push(createElement(tag, props, children));
      }
    } else {
      top.children.push(renderToken(token, isComplete));
    }
  }
  return root.children;
}

/** Return what precedes the content of a block: the box of a task, the number of a footnote. */
function firstChildren(token: Token): ComponentChildren[] {
  if (token.type === "footnote_open") return [<sup>{displayText(token.info)}</sup>, " "];
  if (token.type !== "list_item_open" || !token.meta) return [];
  const { isDone } = token.meta as { isDone: boolean };
  return [<input type="checkbox" disabled checked={isDone} aria-label={isDone ? labels.value.markdown.done : labels.value.markdown.toDo} />];
}

/** Move to the note of a reference. */
function showNote(reference: Element, name: string): void {
  reference.closest(".markdown")?.querySelector<HTMLElement>(`[data-note="${CSS.escape(name)}"]`)?.focus();
}

function createElement(tag: string, props: Record<string, unknown>, children: ComponentChildren[]): ComponentChildren {
  if (tag === "a") return h("a", props, ...children);
  if (tag === "div") return h("div", props, ...children); // a footnote
  if (!TAGS.has(tag)) return h(Fragment, null, ...children);
  if (tag === "table") return h("div", { class: "scroll" }, h("table", props, ...children));
  return h(tag, props, ...children);
}

function attributesOf(token: Token): Record<string, unknown> {
  if (token.tag === "a") {
    return { href: token.attrGet("href") ?? "", target: "_blank", rel: "noopener noreferrer nofollow" };
  }
  if (token.type === "footnote_open") return { class: "footnote", dir: "auto", "data-note": token.info, tabIndex: -1 };
  const direction = token.attrGet("dir");
  const found: Record<string, unknown> = direction ? { dir: direction } : /^(p|h\d|li|t[hd])$/.test(token.tag) ? { dir: "auto" } : {};
  if (token.type === "list_item_open" && token.meta) found["class"] = "task";
  const start = token.attrGet("start");
  if (start !== null) found["start"] = Number(start);
  const align = /text-align:(left|center|right)/.exec(String(token.attrGet("style") ?? ""));
  if (align) found["style"] = { textAlign: align[1] };
  return found;
}

function renderToken(token: Token, isComplete: boolean): ComponentChildren {
  switch (token.type) {
    case "inline":
      return h(Fragment, null, ...renderTokens(token.children ?? [], isComplete));
    case "long_table":
      return <pre class="plain" children={<Plain text={token.content} />} />;
    case "long":
      return <Plain text={token.content} />;
    case "text":
      return displayText(token.content);
    case "code_inline":
      return <code>{displayText(token.content)}</code>;
    case "softbreak":
    case "hardbreak":
      return <br />;
    case "hr":
      return <hr />;
    case "fence":
    case "code_block":
      return <Code text={token.content} language={token.info.trim().split(/\s+/)[0] ?? ""} isComplete={isComplete} />;
    case "math":
    case "math_block":
      return <Formula tex={token.content} display={Boolean((token.meta as { display: boolean }).display)} />;
    case "footnote_reference": {
      const name = token.info;
      return (
        <sup>
          <button class="reference" type="button" aria-label={labels.value.markdown.footnote(name)} onClick={(event) => showNote(event.currentTarget, name)}>
            {displayText(name)}
          </button>
        </sup>
      );
    }
    case "image":
      // Images that a model names are not fetched.
      return <span class="picture">[{displayText(token.content || labels.value.markdown.picture)}]</span>;
    default:
      return displayText(token.content);
  }
}
