// Axes of the charts.

const CHARACTER = 6.5; // pixels, of the font of the axes
const TICKS = 18;
const LEAST = 44;

/** Return the width of the y axis: its widest label, and room for the ticks. */
export function axisWidth(labels: readonly string[] | null): number {
  const longest = Math.max(0, ...(labels ?? []).map((one) => one.length));
  return Math.max(LEAST, Math.ceil(longest * CHARACTER) + TICKS);
}
