// Formulas in Markdown: $…$ and \(…\) in a line, $$…$$ and \[…\] as blocks.
import type MarkdownItClass from "markdown-it";

const PAIRS: [open: string, close: string, display: boolean][] = [
  ["$$", "$$", true],
  ["\\[", "\\]", true],
  ["\\(", "\\)", false],
  ["$", "$", false],
];
const LONGEST = 10_000;
const DEEPEST = 200; // nested braces; parsing thousands takes long

/** Return true if braces are nested too deeply. */
function isTooDeep(tex: string): boolean {
  let depth = 0;
  for (const one of tex) {
    depth += one === "{" ? 1 : one === "}" ? -1 : 0;
    if (depth > DEEPEST) return true;
  }
  return false;
}

/** Return the formula that starts at `start`, and its end; null if there is none. */
function formula(text: string, start: number): { tex: string; end: number; display: boolean } | null {
  for (const [open, close, display] of PAIRS) {
    if (!text.startsWith(open, start)) continue;
    const from = start + open.length;
    let end = text.indexOf(close, from);
    while (end > 0 && close.startsWith("$") && text[end - 1] === "\\") end = text.indexOf(close, end + 1);
    if (end < 0 || end - from > LONGEST) return null;
    const tex = text.slice(from, end);
    if (!tex.trim() || isTooDeep(tex)) return null;
    // "$5 and $6" is money: a formula has no space next to its dollar signs, and no digit after the second.
    if (open === "$" && (/^\s|\s$|\n\n/.test(tex) || /\d/.test(text[end + 1] ?? ""))) return null;
    return { tex, end: end + close.length, display };
  }
  return null;
}

export function math(md: InstanceType<typeof MarkdownItClass>): void {
  md.inline.ruler.before("escape", "math", (state, silent) => {
    const found = formula(state.src, state.pos);
    if (!found) return false;
    if (!silent) {
      const token = state.push("math", "", 0);
      token.content = found.tex;
      token.meta = { display: found.display };
    }
    state.pos = found.end;
    return true;
  });
  md.block.ruler.before(
    "fence",
    "math_block",
    (state, line, endLine, silent) => {
      const start = state.bMarks[line]! + state.tShift[line]!;
      const text = state.src;
      if (!text.startsWith("$$", start) && !text.startsWith("\\[", start)) return false;
      const found = formula(text, start);
      if (!found || !found.display) return false;
      let last = line;
      while (last + 1 < endLine && state.eMarks[last]! < found.end) last++;
      if (text.slice(found.end, state.eMarks[last]).trim()) return false; // followed by text
      if (silent) return true;
      const token = state.push("math_block", "", 0);
      token.content = found.tex;
      token.meta = { display: true };
      token.map = [line, last + 1];
      state.line = last + 1;
      return true;
    },
    { alt: ["paragraph"] },
  );
}
