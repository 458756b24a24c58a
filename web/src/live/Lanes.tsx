import { count, short } from "./format";
import type { Known, Slot } from "./state";

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
        {count(sum)} / {count(of)}
      </span>
    </div>
  );
}

/** What a slot does, in a word. */
export function doing(slot: Slot): "idle" | "reading" | "answering" {
  return !slot.busy ? "idle" : slot.predicted ? "answering" : "reading";
}

function Lane({ slot, perSecond, asks }: { slot: Slot; perSecond: number; asks: string }) {
  const state = doing(slot);
  const known = slot.cached + slot.computed;
  return (
    <li class={`lane ${state}`} data-slot={slot.id}>
      <div class="lane-head">
        <strong>Slot {slot.id}</strong>
        <span class={`tag ${state}`}>{state}</span>
        <span class="lane-rate">
          {state === "answering" ? (
            <>
              <b>{short(perSecond)}</b> tokens/s
            </>
          ) : null}
        </span>
      </div>
      <Bar
        label="Prompt"
        parts={[
          ["cached", slot.cached],
          ["computed", Math.max(0, Math.min(known, slot.prompt) - slot.cached)],
        ]}
        of={slot.prompt}
      />
      <Bar label="Context" parts={[["used", slot.used]]} of={slot.n_ctx} />
      <p class="lane-foot">
        {slot.task < 0
          ? "no request yet"
          : `${count(slot.predicted)} tokens written${slot.left >= 0 && slot.busy ? `, at most ${count(slot.left)} more` : ""}` +
            (slot.cached ? `; ${count(slot.cached)} from the cache` : "")}
        {asks && <span class="asks"> {asks}</span>}
      </p>
    </li>
  );
}

/** The slots, side by side, and who waits behind them. */
export function Lanes({ known }: { known: Known }) {
  const slots = known.slots ?? [];
  const asks = new Map((known.running ?? []).flatMap((one) => (one.slots ?? []).map((id) => [id, `${one.path} of ${one.client || "a socket"}`])));
  const waiting = known.waiting ?? 0;
  return (
    <section aria-labelledby="live-slots">
      <h2 id="live-slots">Slots</h2>
      <ul class="lanes">
        {slots.map((slot) => (
          <Lane key={slot.id} slot={slot} perSecond={known.rates.get(slot.id)?.perSecond ?? 0} asks={asks.get(slot.id) ?? ""} />
        ))}
      </ul>
      <p class={waiting ? "queue waits" : "queue"}>
        {waiting ? `${count(waiting)} request${waiting === 1 ? " waits" : "s wait"} for a slot` : "Nobody waits for a slot."}
      </p>
    </section>
  );
}
