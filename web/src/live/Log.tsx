import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { clock } from "./format";
import { filtered, levelOf, type LogLine } from "./state";

const MOST_SHOWN = 400;
const LEVELS: [level: string, words: string][] = [
  ["info", "everything"],
  ["warning", "warnings and errors"],
  ["error", "errors"],
];

/** The last lines of the log, and new ones as they come. `models`: whose lines are among them. */
export function Log({ lines, models = [] }: { lines: LogLine[]; models?: string[] }) {
  const level = useSignal("info");
  const text = useSignal("");
  const model = useSignal("");
  const held = useSignal<LogLine[] | null>(null);
  const list = useRef<HTMLDivElement>(null);
  const atEnd = useRef(true);
  const found = filtered(held.value ?? lines, level.value, text.value, model.value);
  const last = found.at(-1);
  const missed = held.value ? filtered(lines, level.value, text.value, model.value).length - found.length : 0;

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
          <select aria-label="Show lines of" value={level.value} onChange={(event) => (level.value = event.currentTarget.value)}>
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
            <select aria-label="Lines of model" value={model.value} onChange={(event) => (model.value = event.currentTarget.value)}>
              <option value="">all</option>
              {models.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </label>
        )}
        <input
          type="search"
          aria-label="Text in the log"
          placeholder="Text or request id"
          value={text.value}
          onInput={(event) => (text.value = event.currentTarget.value)}
        />
        <button type="button" aria-pressed={held.value !== null} onClick={() => (held.value = held.value ? null : lines)}>
          {held.value ? `Go on${missed > 0 ? ` (${missed} new)` : ""}` : "Pause"}
        </button>
      </div>
      <div
        ref={list}
        class="log"
        role="log"
        aria-live="off"
        aria-label="Lines of the log"
        tabIndex={0}
        onScroll={(event) => {
          const element = event.currentTarget;
          atEnd.current = element.scrollHeight - element.scrollTop - element.clientHeight < 30;
        }}
      >
        {found.slice(-MOST_SHOWN).map((line, index) => (
          <div key={`${line.at} ${index}`} class={`line ${levelOf(line)}`}>
            <time>{clock(line.at)}</time> {levelOf(line) !== "info" && !line.model && <b>{levelOf(line)} </b>}
            {line.text}
          </div>
        ))}
        {!found.length && <p class="nothing">{lines.length ? "No such line." : "Nothing was logged yet."}</p>}
      </div>
    </section>
  );
}
