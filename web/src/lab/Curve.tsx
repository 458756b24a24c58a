import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { labels } from "../text";
import { formatDecimal } from "../ui/format";
import type { Run } from "./experiment";
import { expectedRate } from "./theory";

const HEIGHT = 280;
const LEFT = 46;
const RIGHT = 16;
const TOP = 30;
const BOTTOM = 44;
const MIN_SECONDS = 0.02;

/** Chart of tokens/s over link time per token: runs as dots, the formula as a line, a ring for the present settings. */
export function Curve({ runs, computing, link }: { runs: Run[]; computing: number | null; link: number }) {
  const svg = useRef<SVGSVGElement>(null);
  const [width, setWidth] = useState(720);
  useLayoutEffect(() => {
    const sized = new ResizeObserver(([entry]) => setWidth(Math.max(240, entry!.contentRect.width)));
    sized.observe(svg.current!);
    return () => sized.disconnect();
  }, []);
  const farthest = Math.max(MIN_SECONDS, link, ...runs.map((one) => one.link)) * 1.1;
  const most = Math.max(1, computing === null ? 0 : 1 / computing, ...runs.map((one) => one.rate)) * 1.1;
  const x = (seconds: number) => LEFT + ((width - LEFT - RIGHT) * seconds) / farthest;
  const y = (rate: number) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - rate / most);
  const steps = Array.from({ length: 81 }, (_, i) => (farthest * i) / 80);
  const line = computing === null ? "" : steps.map((at, i) => `${i ? "L" : "M"}${x(at).toFixed(1)} ${y(expectedRate(computing, at)!).toFixed(1)}`).join("");
  const last = runs.at(-1);
  const expected = expectedRate(computing, link);
  return (
    <svg ref={svg} class="curve" height={HEIGHT} role="img" aria-label={describe(runs, link, expected)}>
      {axisTicks(most).map((rate) => (
        <g key={rate}>
          <line class="grid" x1={LEFT} x2={width - RIGHT} y1={y(rate)} y2={y(rate)} />
          <text x={LEFT - 6} y={y(rate) + 4} text-anchor="end">
            {rate}
          </text>
        </g>
      ))}
      {axisTicks(1e3 * farthest).map((at) => (
        <text key={at} x={x(at / 1e3)} y={HEIGHT - BOTTOM + 18} text-anchor="middle">
          {at}
        </text>
      ))}
      <text class="axis" x={width - RIGHT} y={HEIGHT - 8} text-anchor="end">
        {labels.value.lab.linkTimeAxis}
      </text>
      <text class="axis" x={8} y={18}>
        {labels.value.common.tokensPerSecond}
      </text>
      <path class="theory" d={line} />
      <line class="now" x1={x(link)} x2={x(link)} y1={TOP} y2={y(0)} />
      {runs.map((one, i) => (
        <circle key={i} class={`${one === last ? "last" : ""} ${one.same ? "" : "differs"}`} cx={x(one.link)} cy={y(one.rate)} r={one === last ? 6 : 3.5} />
      ))}
      {expected !== null && <circle class="now" cx={x(link)} cy={y(expected)} r={8} />}
    </svg>
  );
}

/** Return about five round numbers from 0 to `most`. */
function axisTicks(most: number): number[] {
  const rough = most / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough)!;
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => Number((i * step).toPrecision(6)));
}

function describe(runs: Run[], link: number, expected: number | null): string {
  const t = labels.value.lab;
  const last = runs.at(-1);
  const done = last ? t.runs(runs.length, formatDecimal(1e3 * last.link, 0), formatDecimal(last.rate, 1)) : t.noRuns;
  return expected === null ? done : t.expected(done, formatDecimal(expected, 1), formatDecimal(1e3 * link, 0));
}
