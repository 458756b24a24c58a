// CommonMark with tables and strikethrough, and formulas. HTML is text.
import MarkdownItClass from "markdown-it";
import { math } from "./math";

export type MarkdownIt = InstanceType<typeof MarkdownItClass>;
export type Token = ReturnType<MarkdownIt["parse"]>[number];

const LONGEST_PARAGRAPH = 10_000; // characters
const SAFE_LINK = /^(https?:|mailto:)/i;

function make(): MarkdownIt {
  const md = new MarkdownItClass({ html: false, linkify: true, breaks: true, maxNesting: 60 });
  md.validateLink = (url: string) => SAFE_LINK.test(url.trim());
  md.use(math);
  // What is in so long a paragraph is not looked at: delimiters without end take seconds to pair.
  md.core.ruler.before("inline", "long", (state) => {
    for (const token of state.tokens) {
      if (token.type === "inline" && token.content.length > LONGEST_PARAGRAPH) token.type = "long";
    }
  });
  return md;
}

const md = make();

export function parse(text: string): Token[] {
  return md.parse(text, {});
}

export interface Block {
  /** The lines it is made of: what has the same source looks the same. */
  source: string;
  tokens: Token[];
  elements: number;
}

/** The text's outermost blocks. */
export function blocks(text: string): Block[] {
  const lines = text.split("\n");
  const found: Block[] = [];
  let depth = 0;
  let elements = 0;
  let tokens: Token[] = [];
  let map: [number, number] | null = null;
  for (const token of parse(text)) {
    if (depth === 0) map = token.map;
    tokens.push(token);
    depth += token.nesting;
    elements += token.nesting >= 0 ? 1 + (token.children?.length ?? 0) : 0;
    if (depth === 0) {
      found.push({ source: map ? lines.slice(map[0], map[1]).join("\n") : `${found.length}`, tokens, elements });
      tokens = [];
      elements = 0;
    }
  }
  return found;
}
