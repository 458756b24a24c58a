import type { Signal } from "@preact/signals";

export type Window = [seconds: number, words: string];

/** Selects the time span of a chart. */
export function TimeWindow({ title, windows, chosen }: { title: string; windows: Window[]; chosen: Signal<number> }) {
  return (
    <label>
      {title}{" "}
      <select value={chosen.value} onChange={(event) => (chosen.value = Number(event.currentTarget.value))}>
        {windows.map(([value, words]) => (
          <option key={value} value={value}>
            {words}
          </option>
        ))}
      </select>
    </label>
  );
}
