// Extras of lists and tables: check boxes of task lists, `<br>` as a line break, and the reading direction.
import type { MarkdownIt, Token } from "./parser";

const TASK = /^\[([ xX])\]\s+/;
const BREAK = /^<br\s*\/?>/i;

/** Mark list items that begin with `[ ]` or `[x]`; the mark is removed from their text. */
export function taskLists(md: MarkdownIt): void {
  md.core.ruler.before("inline", "task_lists", (state) => {
    state.tokens.forEach((token, index) => {
      const item = state.tokens[index - 2];
      const found = token.type === "inline" && item?.type === "list_item_open" && TASK.exec(token.content);
      if (!found) return;
      item.meta = { isDone: found[1] !== " " };
      token.content = token.content.slice(found[0].length);
    });
  });
}

/** Models write `<br>` in table cells, which cannot hold line breaks. */
export function lineBreaks(md: MarkdownIt): void {
  md.inline.ruler.before("html_inline", "line_break", (state, silent) => {
    const found = BREAK.exec(state.src.slice(state.pos, state.pos + 10));
    if (!found) return false;
    if (!silent) state.push("hardbreak", "br", 0);
    state.pos += found[0].length;
    return true;
  });
}

const FIRST_LETTER = /\p{L}/u;
const RIGHT_TO_LEFT = /[\u0590-\u08FF\uFB1D-\uFDFF\uFE70-\uFEFF]|\p{Script=Adlam}/u;

/**
 * Set the direction of lists, quotations and tables to that of their first letter. `dir="auto"` cannot: browsers skip
 * descendants that have a `dir` of their own, as paragraphs and items have.
 */
export function directions(md: MarkdownIt): void {
  md.core.ruler.push("directions", (state) => {
    const open: Token[] = [];
    for (const token of state.tokens) {
      if (/^(bullet_list|ordered_list|blockquote|table)_open$/.test(token.type)) open.push(token);
      const letter = token.type === "inline" && open.length ? FIRST_LETTER.exec(token.content) : null;
      if (!letter) continue;
      for (const one of open.splice(0)) one.attrSet("dir", RIGHT_TO_LEFT.test(letter[0]) ? "rtl" : "ltr");
    }
  });
}
