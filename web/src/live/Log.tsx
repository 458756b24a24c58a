import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { formatClock } from "../ui/format";
import { filterLines, levelOf, type LogLine } from "./state";

const MAX_SHOWN = 400;
const LEVELS: [level: string, words: string][] = [
  ["info", "everything"],
  ["warning", "warnings and errors"],
  ["error", "errors"],
];

/** The log. `models`: models whose lines are part of it. */
export function Log({ lines, models = [] }: { lines: LogLine[]; models?: string[] }) {
  const level = useSignal("info");
  const text = useSignal("");
  const model = useSignal("");
  const paused = useSignal<LogLine[] | null>(null);
  const list = useRef<HTMLDivElement>(null);
  const atEnd = useRef(true);
  const found = filterLines(paused.value ?? lines, level.value, text.value, model.value);
  const last = found.at(-1);
  const missed = paused.value ? filterLines(lines, level.value, text.value, model.value).length - found.length : 0;

  useEffect(() => {
    const element = list.current;
    if (element && atEnd.current) element.scrollTop = element.scrollHeight;
  }, [last, found.length]);

  return (
    <section aria-labelledby="live-log">
      <div class="section-head">
        <h2 id="live-log">Log</h2>
        <label>
          Show{" "}
          <select aria-label="Log level" value={level.value} onChange={(event) => (level.value = event.currentTarget.value)}>
            {LEVELS.map(([value, words]) => (
              <option key={value} value={value}>
                {words}
              </option>
            ))}
          </select>
        </label>
        {models.length > 0 && (
          <label>
            of model{" "}
            <select aria-label="Model" value={model.value} onChange={(event) => (model.value = event.currentTarget.value)}>
              <option value="">all</option>
              {models.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </label>
        )}
        <input
          type="search"
          aria-label="Search the log"
          placeholder="Text or request id"
          value={text.value}
          onInput={(event) => (text.value = event.currentTarget.value)}
        />
        <button type="button" aria-pressed={paused.value !== null} onClick={() => (paused.value = paused.value ? null : lines)}>
          {paused.value ? `Resume${missed > 0 ? ` (${missed} new)` : ""}` : "Pause"}
        </button>
      </div>
      <div
        ref={list}
        class="log"
        role="log"
        aria-live="off"
        aria-label="Log lines"
        tabIndex={0}
        onScroll={(event) => {
          const element = event.currentTarget;
          atEnd.current = element.scrollHeight - element.scrollTop - element.clientHeight < 30;
        }}
      >
        {found.slice(-MAX_SHOWN).map((line, index) => (
          <div key={`${line.at} ${index}`} class={`line ${levelOf(line)}`}>
            <time>{formatClock(line.at)}</time> {levelOf(line) !== "info" && !line.model && <b>{levelOf(line)} </b>}
            {line.text}
          </div>
        ))}
        {!found.length && <p class="nothing">{lines.length ? "No matching lines." : "No log lines yet."}</p>}
      </div>
    </section>
  );
}
