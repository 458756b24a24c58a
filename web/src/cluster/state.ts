// The cluster as the server reports it, and the layout that the user tries out.
import { computed, signal } from "@preact/signals";
import { ApiFailure, postJson, stream } from "../api/http";
import { afterMessage } from "./events";
import type { ClusterBody, LayoutPrediction, ViewChange, WholeView } from "./schema";
import { type Layout, layoutOf, partsOf, same } from "./layout";

export const cluster = signal<ClusterBody | null>(null);
/** Why nothing comes; "" while it does. */
export const trouble = signal("");
/** The layout as it is. */
export const now = computed<Layout>(() => layoutOf(cluster.value?.devices ?? []));
/** The layout that is tried out; null: none. */
export const draft = signal<Layout | null>(null);
export const prediction = signal<LayoutPrediction | null>(null);
export const busy = signal<"" | "predicting" | "moving">("");
/** Why the layout that is tried out cannot be. */
export const refused = signal("");

const AGAIN_MS = 700;

/** Follows the server's events until the returned function is called; a hidden page asks for none. */
export function watch(): () => void {
  let stop = new AbortController();
  let ended = false;

  async function follow(): Promise<void> {
    const { signal: aborted } = stop;
    while (!aborted.aborted && !document.hidden) {
      try {
        let view: WholeView | null = null;
        for await (const message of stream("GET", "cluster/events", { signal: aborted })) {
          view = afterMessage(view, message as WholeView | ViewChange);
          if (!view) break; // a message is missing: the next connection begins with the whole view
          cluster.value = view.cluster;
          trouble.value = "";
        }
      } catch (error) {
        if (aborted.aborted) return;
        trouble.value = error instanceof Error ? error.message : String(error);
        if (error instanceof ApiFailure && error.status === 401) return; // begun again with the key
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  function shown(): void {
    stop.abort();
    stop = new AbortController();
    if (!ended && !document.hidden) void follow();
  }

  document.addEventListener("visibilitychange", shown);
  void follow();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", shown);
    stop.abort();
  };
}

let asked = 0;

/** Tries out a layout: asks what it would take. */
export async function tryOut(layout: Layout): Promise<void> {
  if (same(layout, now.value)) {
    discard();
    return;
  }
  const number = ++asked;
  draft.value = layout;
  refused.value = "";
  busy.value = "predicting";
  try {
    const found = await postJson<LayoutPrediction>("cluster/predict", { devices: partsOf(layout) });
    if (number === asked) prediction.value = found;
  } catch (error) {
    if (number === asked) refused.value = error instanceof Error ? error.message : String(error);
  }
  if (number === asked) busy.value = "";
}

/** Has the server measure the speeds that nobody knows yet; what a token should take comes with its next event. */
export async function measure(): Promise<void> {
  const number = ++asked;
  busy.value = "predicting";
  try {
    await postJson<LayoutPrediction>("cluster/predict", { devices: partsOf(now.value) });
  } catch (error) {
    trouble.value = error instanceof Error ? error.message : String(error);
  }
  if (number === asked) busy.value = "";
}

export function discard(): void {
  asked++;
  draft.value = prediction.value = null;
  refused.value = busy.value = "";
}

/** Has the server move layers as they are tried out. */
export async function apply(): Promise<void> {
  if (!draft.value) return;
  const number = ++asked;
  busy.value = "moving";
  try {
    cluster.value = await postJson<ClusterBody>("cluster/layers", { devices: partsOf(draft.value) });
    if (number === asked) discard();
  } catch (error) {
    if (number !== asked) return;
    busy.value = "";
    refused.value = error instanceof Error ? error.message : String(error);
  }
}
