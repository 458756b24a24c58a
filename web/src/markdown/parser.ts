// Markdown parser: CommonMark with tables, strikethrough, task lists, footnotes and formulas. HTML is text.
import MarkdownItClass from "markdown-it";
import { footnotes } from "./footnotes";
import { directions, lineBreaks, taskLists } from "./lists";
import { math } from "./math";

export type MarkdownIt = InstanceType<typeof MarkdownItClass>;
export type Token = ReturnType<MarkdownIt["parse"]>[number];

const MAX_PARAGRAPH = 10_000; // characters
const MAX_CELLS = 1_000; // of a table, approximately
const ELEMENTS_OF_FORMULA = 5;
const SAFE_LINK = /^(https?:|mailto:)/i;

function createParser(): MarkdownIt {
  const md = new MarkdownItClass({ html: false, linkify: true, breaks: true, maxNesting: 60 });
  md.validateLink = (url: string) => SAFE_LINK.test(url.trim());
  for (const extension of [math, footnotes, taskLists, lineBreaks, directions]) md.use(extension);
  // Inline markup of a long paragraph is not parsed: pairing many delimiters takes seconds.
  md.core.ruler.before("inline", "long", (state) => {
    for (const token of state.tokens) {
      if (token.type === "inline" && token.content.length > MAX_PARAGRAPH) token.type = "long";
    }
  });
  // Cells of a large table are not parsed either, because they would be parsed again with every frame.
  md.block.ruler.before("table", "long_table", (state, first, last, silent) => {
    if (first + 2 > last || !isBelowHead(line(state, first + 1))) return false;
    let end = first;
    let cells = 0;
    while (end < last && !state.isEmpty(end) && state.sCount[end]! >= state.blkIndent) {
      cells += line(state, end++).split("|").length - 1;
    }
    if (cells <= MAX_CELLS) return false;
    if (silent) return true;
    const token = state.push("long_table", "", 0);
    token.content = state.getLines(first, end, state.blkIndent, true);
    token.map = [first, end];
    state.line = end;
    return true;
  });
  return md;
}

function line(state: { src: string; bMarks: number[]; eMarks: number[] }, at: number): string {
  return state.src.slice(state.bMarks[at], state.eMarks[at]);
}

/** Return true for the line between a table's header and its rows. */
function isBelowHead(text: string): boolean {
  return text.includes("|") && text.includes("-") && /^[\s>|:-]+$/.test(text);
}

const md = createParser();

export function parse(text: string): Token[] {
  return md.parse(text, {});
}

export interface Block {
  /** Source lines; blocks with the same source and references look the same. */
  source: string;
  /** Number of references to footnotes, which are recognized once their note is there. */
  references: number;
  /** Number of the first line. */
  line: number;
  tokens: Token[];
  elements: number;
}

/** Return the lines of a text, as the parser counts them. */
export function linesOf(text: string): string[] {
  return text.split(/\r\n?|\n/);
}

/** Return the approximate number of elements of inline tokens; a formula consists of several. */
function countElements(tokens: readonly Token[]): number {
  return tokens.reduce((all, token) => all + (token.type === "math" ? ELEMENTS_OF_FORMULA : 1), 0);
}

/** Return the top-level blocks of a text. */
export function blocks(text: string): Block[] {
  const lines = linesOf(text);
  const found: Block[] = [];
  let depth = 0;
  let elements = 0;
  let tokens: Token[] = [];
  let map: [number, number] | null = null;
  let references = 0;
  for (const token of parse(text)) {
    if (depth === 0) map = token.map;
    tokens.push(token);
    depth += token.nesting;
    elements += token.nesting >= 0 ? 1 + countElements(token.children ?? []) : 0;
    references += token.children?.filter((one) => one.type === "footnote_reference").length ?? 0;
    if (depth === 0) {
      const source = map ? lines.slice(map[0], map[1]).join("\n") : `${found.length}`;
      found.push({ source, references, line: map?.[0] ?? 0, tokens, elements });
      tokens = [];
      elements = references = 0;
    }
  }
  return found;
}
