import { useSignal } from "@preact/signals";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { isDark } from "../shell/theme";
import { type Catalogue, labels } from "../text";
import { formatClock, formatCount, formatRate, formatSeconds } from "../ui/format";
import type { Samples } from "./state";
import { axisWidth } from "./axis";
import { TimeWindow, type Window } from "./TimeWindow";

type Labels = Catalogue["live"];

interface Line {
  of: keyof Samples;
  label: (t: Labels) => string;
  color: string;
}
interface Plot {
  title: (t: Labels) => string;
  lines: Line[];
  format: (value: number) => string;
  /** Smallest value range of the y axis. */
  minRange: number;
  /** True if values are integers. */
  isInteger?: boolean;
}

const perSecond = () => labels.value.common.tokensPerSecond;

const PLOTS: Plot[] = [
  { title: (t) => t.generation, lines: [{ of: "answer", label: perSecond, color: "--accent" }], format: formatRate, minRange: 10 },
  { title: (t) => t.prompts, lines: [{ of: "prompt", label: perSecond, color: "--prompt" }], format: formatRate, minRange: 10 },
  {
    title: (t) => t.requestsChart,
    lines: [
      { of: "running", label: (t) => t.charts.active, color: "--accent" },
      { of: "waiting", label: (t) => t.charts.waiting, color: "--bad" },
    ],
    format: formatCount,
    minRange: 4,
    isInteger: true,
  },
  { title: (t) => t.kvCells, lines: [{ of: "cells", label: (t) => t.charts.used, color: "--accent" }], format: formatCount, minRange: 100, isInteger: true },
  { title: (t) => t.timeToFirstToken, lines: [{ of: "first_token", label: (t) => t.charts.mean, color: "--prompt" }], format: formatSeconds, minRange: 1 },
  { title: (t) => t.errors, lines: [{ of: "errors", label: (t) => t.charts.requests, color: "--bad" }], format: formatCount, minRange: 4, isInteger: true },
];
const INTEGER_STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000];
const MIN_SECONDS = 60;
const HEIGHT = 120;
/** Return a color of base.css for a canvas; light-dark() is resolved on elements only. */
function color(element: HTMLElement, name: string): string {
  element.style.color = `var(${name})`;
  const found = getComputedStyle(element).color;
  element.style.color = "";
  return found;
}

function Chart({ plot, samples, span }: { plot: Plot; samples: Samples; span: number }) {
  const t = labels.value.live;
  const place = useRef<HTMLDivElement>(null);
  const chart = useRef<uPlot | null>(null);
  const shown = useRef({ samples, span });
  const at = useSignal<number | null>(null);
  const dark = isDark();
  shown.current = { samples, span };

  function range(): [number, number] {
    const times = shown.current.samples.at;
    const last = times.at(-1) ?? 0;
    return [Math.min(last - MIN_SECONDS, Math.max(last - shown.current.span, times[0] ?? 0)), last];
  }

  useEffect(() => {
    const element = place.current!;
    const [ink, line] = [color(element, "--faint"), color(element, "--line")];
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "11px Inter, system-ui, sans-serif" };
    const made = new uPlot(
      {
        width: element.clientWidth,
        height: HEIGHT,
        legend: { show: false },
        cursor: { sync: { key: "live" }, y: false, drag: { x: false, y: false }, points: { size: 6 } },
        scales: { x: { range }, y: { range: (_chart, _low, high) => [0, high > 0 ? high * 1.1 : plot.minRange] } },
        axes: [
          { ...axis, size: 26, space: 70, values: (_chart, times) => times.map((time) => formatClock(time).slice(0, time % 60 ? 8 : 5)) },
          { ...axis, ...(plot.isInteger ? { incrs: INTEGER_STEPS } : {}), size: (_chart, labels) => axisWidth(labels), space: 28, values: (_chart, values) => values.map((value) => plot.format(value)) },
        ],
        series: [
          {},
          ...plot.lines.map((one) => {
            const stroke = color(element, one.color);
            const fill = stroke.replace(/^rgb\((.*)\)$/, "rgba($1, 0.12)");
            // Seconds without a first token leave no gap: the line would consist of gaps.
            return { stroke, fill, width: 1.5, points: { show: false }, spanGaps: true };
          }),
        ],
        hooks: { setCursor: [(one) => (at.value = one.cursor.idx ?? null)] },
      },
      [[], ...plot.lines.map(() => [])] as uPlot.AlignedData,
      element,
    );
    chart.current = made;
    const sized = new ResizeObserver(() => made.setSize({ width: element.clientWidth, height: HEIGHT }));
    sized.observe(element);
    return () => {
      sized.disconnect();
      made.destroy();
      chart.current = null;
    };
  }, [plot, dark]);

  useEffect(() => {
    chart.current?.setData([samples.at, ...plot.lines.map((one) => samples[one.of])] as uPlot.AlignedData);
  }, [plot, dark, samples, span]);

  const index = at.value ?? samples.at.length - 1;
  const values = plot.lines.map((one) => {
    const value = samples[one.of][index];
    return `${one.label(t)} ${value == null ? "–" : plot.format(value)}`;
  });
  const time = samples.at[index];
  const words = `${plot.title(t)}: ${values.join(", ")}`;
  return (
    <figure class="chart" data-points={samples.at.length}>
      <figcaption>
        <strong>{plot.title(t)}</strong>
        <span>
          {plot.lines.map((one, place) => (
            <span key={one.of} class="chart-value">
              <i style={{ background: `var(${one.color})` }} /> {values[place]}
            </span>
          ))}
        </span>
      </figcaption>
      <div ref={place} role="img" aria-label={time === undefined ? words : t.chartAt(words, formatClock(time).slice(0, 8))} />
    </figure>
  );
}

/** Charts of the last hour, with a sample per second. */
export function Charts({ samples }: { samples: Samples }) {
  const t = labels.value.live;
  const span = useSignal(3600);
  const windows: Window[] = [
    [300, t.minutes(5)],
    [900, t.minutes(15)],
    [3600, t.hours(1)],
  ];
  return (
    <section aria-labelledby="live-charts">
      <div class="section-head">
        <h2 id="live-charts">{t.overTime}</h2>
        <TimeWindow title={t.last} windows={windows} chosen={span} />
      </div>
      <div class="charts">
        {PLOTS.map((plot, index) => (
          <Chart key={index} plot={plot} samples={samples} span={span.value} />
        ))}
      </div>
    </section>
  );
}
