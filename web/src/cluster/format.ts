// Formats of figures.

export function ms(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined) return "–";
  const value = 1e3 * seconds;
  return `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : Math.round(value)} ms`;
}

export function bytes(n: number): string {
  if (n >= 1 << 30) return `${(n / (1 << 30)).toFixed(1)} GiB`;
  if (n >= 10 << 20) return `${Math.round(n / (1 << 20))} MiB`;
  return n >= 1 << 20 ? `${(n / (1 << 20)).toFixed(1)} MiB` : `${Math.ceil(n / 1024)} KiB`;
}

export function perSecond(n: number | null): string {
  if (n === null) return "–";
  return n >= 1e9 ? `${(n / 1e9).toFixed(1)} GB/s` : `${Math.round(n / 1e6)} MB/s`;
}

/** Return a device's name without its address. */
export function shortName(device: string): string {
  return device.replace(/\[.*\]$/, "");
}
