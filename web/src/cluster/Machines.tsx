import { labels } from "../text";
import { formatBandwidth, formatBytes, formatMs } from "../ui/format";
import { describeLayers, shortName } from "./layout";
import { currentLayout } from "./state";
import type { DeviceView } from "../api/schema";

/** This machine, and each worker behind its link. */
export function Machines({ devices }: { devices: DeviceView[] }) {
  const here = devices.filter((one) => one.endpoint === null);
  const there = devices.filter((one) => one.endpoint !== null);
  return (
    <div class="machines">
      <article class="machine here" aria-label={labels.value.cluster.thisMachine}>
        <h3>{labels.value.cluster.thisMachine}</h3>
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
  const t = labels.value.cluster;
  const trip = device.link.pulse ?? device.link.round_trip;
  return (
    <div class="link">
      <span class="wire" aria-hidden="true" />
      <span class="tag">
        <span title={t.roundTripTitle}>{trip === null ? "?" : t.roundTrip(formatMs(trip))}</span>
        {device.link.bandwidth !== null && <span title={t.bandwidthTitle}>{formatBandwidth(device.link.bandwidth)}</span>}
        {device.predicted.bytes > 0 && <span title={t.bothDirections}>{t.bytesPerToken(formatBytes(device.predicted.bytes))}</span>}
        {device.passes_to.length > 0 && <span>{t.sendsTo(device.passes_to.map(shortName).join(", "))}</span>}
      </span>
    </div>
  );
}

function DeviceDetails({ device, number }: { device: DeviceView; number: number }) {
  const t = labels.value.cluster;
  const { memory } = device;
  const most = Math.max(memory.free, memory.weights + memory.kv + memory.compute, 1);
  const part = (n: number) => ({ width: `${(100 * n) / most}%` });
  const used = memory.weights + memory.kv + memory.compute;
  return (
    <div class={`body ${device.state}`} style={{ "--own": `var(--device-${number % 6})` }}>
      <p class="state">
        <span class="dot" aria-hidden="true" /> <strong>{t.states[device.state]}</strong>
        {device.holds !== null && `: ${describeLayers(currentLayout.value, device.device)}`}
      </p>
      {device.why && <p class="why">{device.why}</p>}
      <div class="memory" role="img" aria-label={t.memory(formatBytes(used), formatBytes(memory.free))}>
        <b class="weights" style={part(memory.weights)} title={t.weights(formatBytes(memory.weights))} />
        <b class="kv" style={part(memory.kv)} title={t.kvCache(formatBytes(memory.kv))} />
        <b class="compute" style={part(memory.compute)} title={t.computeBuffers(formatBytes(memory.compute))} />
      </div>
      <p class="small">
        {memory.total ? t.usedOf(formatBytes(used), formatBytes(memory.free)) : t.used(formatBytes(used))}
        {device.speed.decode !== null && ` · ${t.reads(formatBandwidth(device.speed.decode))}`}
        {memory.free_now !== null && ` · ${t.freeNow(formatBytes(memory.free_now))}`}
        {device.utilization !== null && ` · ${t.busy(Math.round(100 * device.utilization))}`}
      </p>
    </div>
  );
}
