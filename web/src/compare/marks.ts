// Highlights of words in rendered text, without changing its elements (CSS Custom Highlight API).
import { differingWords, words } from "./differences";

export const MARK = "differs";

interface Highlights {
  set(name: string, value: object): void;
  delete(name: string): void;
}

const registry = (CSS as { highlights?: Highlights }).highlights;
const Highlighted = (globalThis as { Highlight?: new (...ranges: Range[]) => object }).Highlight;

interface PlacedWord {
  text: string;
  node: Text;
  start: number;
}

/** Return the words below an element; a word that crosses elements counts as two. */
function wordsBelow(root: Element): PlacedWord[] {
  const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT);
  const found: PlacedWord[] = [];
  for (let node = walker.nextNode() as Text | null; node; node = walker.nextNode() as Text | null) {
    for (const { text, start } of words(node.data)) found.push({ text, node, start });
  }
  return found;
}

/** Highlight the differences in pairs of elements. Return the number of words that differ, and of all words. */
export function mark(pairs: readonly (readonly [Element, Element])[]): { differ: number; of: number } {
  const ranges: Range[] = [];
  let of = 0;
  for (const pair of pairs) {
    const sides = [wordsBelow(pair[0]), wordsBelow(pair[1])] as const;
    const [left, right] = differingWords(
      sides[0].map((word) => word.text),
      sides[1].map((word) => word.text),
    );
    of += sides[0].length + sides[1].length;
    for (const { text, node, start } of [...left.map((at) => sides[0][at]!), ...right.map((at) => sides[1][at]!)]) {
      const range = document.createRange();
      range.setStart(node, start);
      range.setEnd(node, start + text.length);
      ranges.push(range);
    }
  }
  if (registry && Highlighted) registry.set(MARK, new Highlighted(...ranges));
  return { differ: ranges.length, of };
}

export function unmark(): void {
  registry?.delete(MARK);
}
