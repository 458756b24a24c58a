// Footnotes in Markdown: `[^name]` in a text, and `[^name]: …` where the note stands.
import type { MarkdownIt } from "./parser";

const DEFINITION = /^\[\^([^\]\s]{1,50})\]:\s*/;
const REFERENCE = /^\[\^([^\]\s]{1,50})\]/;

/** Values that one parse shares: the names of the notes of the text. */
export interface FootnoteEnvironment {
  footnotes?: Set<string>;
}

export function footnotes(md: MarkdownIt): void {
  md.block.ruler.before(
    "reference",
    "footnote",
    (state, first, end, silent) => {
      const start = state.bMarks[first]! + state.tShift[first]!;
      const found = DEFINITION.exec(state.src.slice(start, state.eMarks[first]));
      if (!found || state.parentType !== "root") return false;
      if (silent) return true;
      const [head, name] = found as unknown as [string, string];
      ((state.env as FootnoteEnvironment).footnotes ??= new Set()).add(name);
      // The note ends before an empty line or the next note.
      let last = first + 1;
      while (last < end && !state.isEmpty(last) && !DEFINITION.test(line(state, last))) last++;
      state.push("footnote_open", "div", 1).info = name;
      const inline = state.push("inline", "", 0);
      inline.content = state.getLines(first, last, state.blkIndent, false).trim().slice(head.length).trim();
      inline.children = [];
      state.push("footnote_close", "div", -1);
      state.tokens.at(-3)!.map = [first, last];
      state.line = last;
      return true;
    },
    { alt: ["paragraph"] },
  );
  // Blocks are parsed before inline text, so that the names are known here.
  md.inline.ruler.before("link", "footnote", (state, silent) => {
    const found = REFERENCE.exec(state.src.slice(state.pos, state.pos + 60));
    if (!found || !(state.env as FootnoteEnvironment).footnotes?.has(found[1]!)) return false;
    if (!silent) state.push("footnote_reference", "", 0).info = found[1]!;
    state.pos += found[0].length;
    return true;
  });
}

function line(state: { src: string; bMarks: number[]; tShift: number[]; eMarks: number[] }, at: number): string {
  return state.src.slice(state.bMarks[at]! + state.tShift[at]!, state.eMarks[at]);
}
