// Formats of numbers.

const NUMBER = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function count(value: number): string {
  return NUMBER.format(value);
}

/** Format a rate with three digits. */
export function short(value: number): string {
  if (value >= 10_000) return `${(value / 1000).toFixed(value >= 100_000 ? 0 : 1)}k`;
  return value >= 100 ? value.toFixed(0) : value >= 10 || value === 0 ? value.toFixed(value ? 1 : 0) : value.toFixed(2);
}

export function bytes(value: number): string {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

export function seconds(value: number): string {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 60 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function clock(at: number): string {
  const time = new Date(at * 1000);
  return `${time.toTimeString().slice(0, 8)}.${String(time.getMilliseconds()).padStart(3, "0")}`;
}
