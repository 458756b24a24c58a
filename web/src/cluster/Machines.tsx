import { formatBandwidth, formatBytes, formatMs } from "../ui/format";
import { shortName } from "./layout";
import type { DeviceView } from "../api/schema";

const WORDS = { ready: "ready", idle: "no layers", lost: "lost", away: "lost, its layers moved to other devices" };

/** This machine, and each worker behind its link. */
export function Machines({ devices }: { devices: DeviceView[] }) {
  const here = devices.filter((one) => one.endpoint === null);
  const there = devices.filter((one) => one.endpoint !== null);
  return (
    <div class="machines">
      <article class="machine here" aria-label="This machine">
        <h3>This machine</h3>
        {here.map((one) => (
          <DeviceDetails key={one.device} device={one} number={devices.indexOf(one)} />
        ))}
      </article>
      <div class="workers">
        {there.map((one) => (
          <div class={`worker ${one.state}`} key={one.device}>
            <LinkDetails device={one} />
            <article class="machine" aria-label={one.device}>
              <h3>
                {shortName(one.device)} <small>{one.endpoint}</small>
              </h3>
              <DeviceDetails device={one} number={devices.indexOf(one)} />
            </article>
          </div>
        ))}
      </div>
    </div>
  );
}

function LinkDetails({ device }: { device: DeviceView }) {
  const trip = device.link.pulse ?? device.link.round_trip;
  return (
    <div class="link">
      <span class="wire" aria-hidden="true" />
      <span class="tag">
        <span title="round trip of the latest heartbeat">{trip === null ? "?" : `${formatMs(trip)} round trip`}</span>
        {device.link.bandwidth !== null && <span title="measured when the worker connected">{formatBandwidth(device.link.bandwidth)}</span>}
        {device.predicted.bytes > 0 && <span title="both directions">{formatBytes(device.predicted.bytes)} per token</span>}
        {device.passes_to.length > 0 && <span>sends directly to {device.passes_to.map(shortName).join(", ")}</span>}
      </span>
    </div>
  );
}

function DeviceDetails({ device, number }: { device: DeviceView; number: number }) {
  const { memory } = device;
  const most = Math.max(memory.free, memory.weights + memory.kv + memory.compute, 1);
  const part = (n: number) => ({ width: `${(100 * n) / most}%` });
  const used = memory.weights + memory.kv + memory.compute;
  return (
    <div class={`body ${device.state}`} style={{ "--own": `var(--device-${number % 6})` }}>
      <p class="state">
        <span class="dot" aria-hidden="true" /> <strong>{WORDS[device.state]}</strong>
        {device.holds ? `: ${device.holds}` : ""}
      </p>
      {device.why && <p class="why">{device.why}</p>}
      <div class="memory" role="img" aria-label={`memory: ${formatBytes(used)} of ${formatBytes(memory.free)}`}>
        <b class="weights" style={part(memory.weights)} title={`weights ${formatBytes(memory.weights)}`} />
        <b class="kv" style={part(memory.kv)} title={`KV cache ${formatBytes(memory.kv)}`} />
        <b class="compute" style={part(memory.compute)} title={`compute buffers ${formatBytes(memory.compute)}`} />
      </div>
      <p class="small">
        {formatBytes(used)} {memory.total ? `of ${formatBytes(memory.free)}` : "used"}
        {device.speed.decode !== null && ` · reads ${formatBandwidth(device.speed.decode)}`}
        {memory.free_now !== null && ` · ${formatBytes(memory.free_now)} free now`}
        {device.utilization !== null && ` · ${Math.round(100 * device.utilization)}% busy`}
      </p>
    </div>
  );
}
