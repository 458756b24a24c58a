import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import { labels } from "../text";
import { formatClock } from "../ui/format";
import { filterLines, levelOf, type LogLine } from "./state";

const MAX_SHOWN = 400;
const LEVELS = ["info", "warning", "error"] as const;

/** The log. `models`: models whose lines are part of it. */
export function Log({ lines, models = [] }: { lines: LogLine[]; models?: string[] }) {
  const t = labels.value.live;
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
        <h2 id="live-log">{t.log}</h2>
        <label>
          {t.show}{" "}
          <select aria-label={t.logLevel} value={level.value} onChange={(event) => (level.value = event.currentTarget.value)}>
            {LEVELS.map((value) => (
              <option key={value} value={value}>
                {t.levels[value]}
              </option>
            ))}
          </select>
        </label>
        {models.length > 0 && (
          <label>
            {t.ofModel}{" "}
            <select aria-label={labels.value.common.model} value={model.value} onChange={(event) => (model.value = event.currentTarget.value)}>
              <option value="">{t.all}</option>
              {models.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </label>
        )}
        <input
          type="search"
          aria-label={t.searchLog}
          placeholder={t.logPlaceholder}
          value={text.value}
          onInput={(event) => (text.value = event.currentTarget.value)}
        />
        <button type="button" aria-pressed={paused.value !== null} onClick={() => (paused.value = paused.value ? null : lines)}>
          {paused.value ? t.resume(Math.max(0, missed)) : t.pause}
        </button>
      </div>
      <div
        ref={list}
        class="log"
        role="log"
        aria-live="off"
        aria-label={t.logLines}
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
        {!found.length && <p class="nothing">{lines.length ? t.noMatches : t.noLines}</p>}
      </div>
    </section>
  );
}
