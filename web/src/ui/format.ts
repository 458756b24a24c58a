// Formats of numbers in the language of the page.
import { language } from "../text/language";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Format an integer with separators of thousands. */
export function formatCount(value: number): string {
  return new Intl.NumberFormat(language.value, { maximumFractionDigits: 0 }).format(value);
}

/** Format a large number with a word or letter for its magnitude, such as 135M. */
export function formatCompact(value: number): string {
  return new Intl.NumberFormat(language.value, { notation: "compact" }).format(value);
}

const decimals = new Map<string, Intl.NumberFormat>();

/** Format a number with a fixed number of digits after the decimal separator, without separators of thousands. */
export function formatDecimal(value: number, digits: number): string {
  const key = `${language.value} ${digits}`;
  let format = decimals.get(key);
  if (!format) {
    format = new Intl.NumberFormat(language.value, { minimumFractionDigits: digits, maximumFractionDigits: digits, useGrouping: false });
    decimals.set(key, format);
  }
  return format.format(value);
}

/** Format a rate with three digits. */
export function formatRate(value: number): string {
  if (value >= 10_000) return `${formatDecimal(value / 1000, value >= 100_000 ? 0 : 1)}k`;
  return formatDecimal(value, value >= 100 || value === 0 ? 0 : value >= 10 ? 1 : 2);
}

export function formatBytes(value: number): string {
  let unit = 0;
  for (; value >= 1024 && unit < UNITS.length - 1; unit++) value /= 1024;
  return `${formatDecimal(value, unit && value < 100 ? 1 : 0)} ${UNITS[unit]}`;
}

export function formatSeconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${formatDecimal(value, value < 10 ? 2 : 1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
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
  return `${formatDecimal(value, value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

export function formatBandwidth(bytesPerSecond: number): string {
  return bytesPerSecond >= 1e9 ? `${formatDecimal(bytesPerSecond / 1e9, 1)} GB/s` : `${Math.round(bytesPerSecond / 1e6)} MB/s`;
}

/** Format a time of day with milliseconds. `at`: seconds since 1970. */
export function formatClock(at: number): string {
  const time = new Date(at * 1000);
  return `${time.toTimeString().slice(0, 8)}.${String(time.getMilliseconds()).padStart(3, "0")}`;
}
