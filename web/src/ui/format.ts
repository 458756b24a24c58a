// Formats of numbers.

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function formatCount(value: number): string {
  return NUMBER.format(value);
}

/** Format a rate with three digits. */
export function formatRate(value: number): string {
  if (value >= 10_000) return `${(value / 1000).toFixed(value >= 100_000 ? 0 : 1)}k`;
  return value >= 100 ? value.toFixed(0) : value >= 10 || value === 0 ? value.toFixed(value ? 1 : 0) : value.toFixed(2);
}

export function formatBytes(value: number): string {
  let unit = 0;
  for (; value >= 1024 && unit < UNITS.length - 1; unit++) value /= 1024;
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

export function formatSeconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

/** Format a length of time as a clock shows it, such as 1:05. */
export function formatLength(seconds: number): string {
  const whole = Math.floor(seconds);
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`;
}

/** Format seconds as milliseconds with three digits; "–" if unknown. */
export function formatMs(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  const value = 1e3 * seconds;
  return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value)} ms`;
}

export function formatBandwidth(bytesPerSecond: number): string {
  return bytesPerSecond >= 1e9 ? `${(bytesPerSecond / 1e9).toFixed(1)} GB/s` : `${Math.round(bytesPerSecond / 1e6)} MB/s`;
}

/** Format a time of day with milliseconds. `at`: seconds since 1970. */
export function formatClock(at: number): string {
  const time = new Date(at * 1000);
  return `${time.toTimeString().slice(0, 8)}.${String(time.getMilliseconds()).padStart(3, "0")}`;
}
