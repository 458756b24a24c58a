import { labels } from "../text";
import { formatCount, formatRate } from "../ui/format";
import type { LiveState, Slot } from "./state";

function Bar({ label, parts, of }: { label: string; parts: [kind: string, value: number][]; of: number }) {
  const sum = parts.reduce((all, [, value]) => all + value, 0);
  const percent = of ? Math.min(100, Math.round((sum / of) * 100)) : 0;
  return (
    <div class="lane-bar">
      <span>{label}</span>
      <div role="progressbar" aria-label={label} aria-valuemin={0} aria-valuemax={100} aria-valuenow={percent}>
        {parts.map(([kind, value]) => (
          <i key={kind} class={kind} style={{ width: `${of ? Math.min(100, (value / of) * 100) : 0}%` }} />
        ))}
      </div>
      <span class="number">
        {formatCount(sum)} / {formatCount(of)}
      </span>
    </div>
  );
}

/** Return the state of a slot. */
export function slotState(slot: Slot): "idle" | "prompt" | "generating" {
  return !slot.busy ? "idle" : slot.predicted ? "generating" : "prompt";
}

function Lane({ slot, perSecond, client }: { slot: Slot; perSecond: number; client: string }) {
  const t = labels.value.live;
  const state = slotState(slot);
  const processed = slot.cached + slot.computed;
  return (
    <li class={`lane state-${state}`} data-slot={slot.id}>
      <div class="lane-head">
        <strong>{t.slot(slot.id)}</strong>
        <span class={`tag state-${state}`}>{t.slotStates[state]}</span>
        <span class="lane-rate">
          {state === "generating" ? (
            <>
              <b>{formatRate(perSecond)}</b> {labels.value.common.tokensPerSecond}
            </>
          ) : null}
        </span>
      </div>
      <Bar
        label={t.prompt}
        parts={[
          ["cached", slot.cached],
          ["computed", Math.max(0, Math.min(processed, slot.prompt) - slot.cached)],
        ]}
        of={slot.prompt}
      />
      <Bar label={t.context} parts={[["used", slot.used]]} of={slot.n_ctx} />
      <p class="lane-foot">
        {slot.task < 0
          ? t.noRequestsYet
          : t.slotTokens(slot.predicted, slot.left >= 0 && slot.busy ? slot.left : null, slot.cached)}
        {client && <span class="client"> {client}</span>}
      </p>
    </li>
  );
}

/** The slots, and the number of queued requests. */
export function Lanes({ live }: { live: LiveState }) {
  const t = labels.value.live;
  const slots = live.slots ?? [];
  const client = new Map((live.running ?? []).flatMap((one) => (one.slots ?? []).map((id) => [id, t.requestFrom(one.path, one.client || t.socket)])));
  const waiting = live.waiting ?? 0;
  return (
    <section aria-labelledby="live-slots">
      <h2 id="live-slots">{t.slots}</h2>
      <ul class="lanes">
        {slots.map((slot) => (
          <Lane key={slot.id} slot={slot} perSecond={live.rates.get(slot.id)?.perSecond ?? 0} client={client.get(slot.id) ?? ""} />
        ))}
      </ul>
      <p class={waiting ? "queue waits" : "queue"}>{t.requestsWaiting(waiting)}</p>
    </section>
  );
}
