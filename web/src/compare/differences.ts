// Words that differ between two texts, by a longest common subsequence.

/** Above this many pairs of words, the middle of the texts counts as different: the table would take seconds. */
const MAX_PAIRS = 4_000_000;

const WORD = /[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu;

export interface Word {
  text: string;
  /** Offset in UTF-16 units. */
  start: number;
}

export function words(text: string): Word[] {
  return Array.from(text.matchAll(WORD), (found) => ({ text: found[0], start: found.index }));
}

/** Return the indices of the words in each text that are not part of a longest common subsequence. */
export function differingWords(one: readonly string[], other: readonly string[]): [number[], number[]] {
  let start = 0;
  while (start < one.length && start < other.length && one[start] === other[start]) start++;
  let ends = [one.length, other.length] as const;
  while (ends[0] > start && ends[1] > start && one[ends[0] - 1] === other[ends[1] - 1]) ends = [ends[0] - 1, ends[1] - 1];
  const rows = ends[0] - start;
  const columns = ends[1] - start;
  if (rows * columns > MAX_PAIRS) return [range(start, ends[0]), range(start, ends[1])];
  // lengths[i][j]: length of the longest common subsequence after word i of one and word j of the other
  const width = columns + 1;
  const lengths = new Uint16Array((rows + 1) * width);
  for (let i = rows - 1; i >= 0; i--) {
    for (let j = columns - 1; j >= 0; j--) {
      lengths[i * width + j] =
        one[start + i] === other[start + j]
          ? lengths[(i + 1) * width + j + 1]! + 1
          : Math.max(lengths[(i + 1) * width + j]!, lengths[i * width + j + 1]!);
    }
  }
  const found: [number[], number[]] = [[], []];
  let i = 0;
  let j = 0;
  while (i < rows && j < columns) {
    if (one[start + i] === other[start + j]) (i++, j++);
    else if (lengths[(i + 1) * width + j]! >= lengths[i * width + j + 1]!) found[0].push(start + i++);
    else found[1].push(start + j++);
  }
  found[0].push(...range(start + i, ends[0]));
  found[1].push(...range(start + j, ends[1]));
  return found;
}

function range(from: number, to: number): number[] {
  return Array.from({ length: to - from }, (_, index) => from + index);
}
