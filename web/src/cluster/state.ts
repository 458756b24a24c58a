// The cluster as the server reports it, and the layout that the user drafts.
import { computed, signal } from "@preact/signals";
import { ApiFailure, postJson, stream } from "../api/http";
import { afterMessage } from "./events";
import type { ClusterBody, LayoutPrediction, ViewChange, WholeView } from "../api/schema";
import { type Layout, layoutOf, partsOf, isSameLayout } from "./layout";

export const cluster = signal<ClusterBody | null>(null);
/** Error of the stream; "" while it works. */
export const errorText = signal("");
/** The layout on the server. */
export const currentLayout = computed<Layout>(() => layoutOf(cluster.value?.devices ?? []));
/** The layout that the user drafts; null if none. */
export const draftLayout = signal<Layout | null>(null);
export const prediction = signal<LayoutPrediction | null>(null);
export const busy = signal<"" | "predicting" | "moving">("");
/** Reason why the server rejected the draft. */
export const draftError = signal("");

const AGAIN_MS = 700;

/** Listen to the server's events until the returned function is called; paused while the page is hidden. */
export function watchCluster(): () => void {
  let stop = new AbortController();
  let ended = false;

  async function listen(): Promise<void> {
    const { signal: aborted } = stop;
    while (!aborted.aborted && !document.hidden) {
      try {
        let view: WholeView | null = null;
        for await (const message of stream("GET", "cluster/events", { signal: aborted })) {
          view = afterMessage(view, message as WholeView | ViewChange);
          if (!view) break; // a message is missing: the next connection starts with the whole view
          cluster.value = view.cluster;
          errorText.value = "";
        }
      } catch (error) {
        if (aborted.aborted) return;
        errorText.value = error instanceof Error ? error.message : String(error);
        if (error instanceof ApiFailure && error.status === 401) return; // started again once the user enters the key
      }
      await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
    }
  }

  function reconnect(): void {
    stop.abort();
    stop = new AbortController();
    if (!ended && !document.hidden) void listen();
  }

  document.addEventListener("visibilitychange", reconnect);
  void listen();
  return () => {
    ended = true;
    document.removeEventListener("visibilitychange", reconnect);
    stop.abort();
  };
}

let latestRequest = 0;

/** Draft a layout and request its predicted time and memory. */
export async function previewLayout(layout: Layout): Promise<void> {
  if (isSameLayout(layout, currentLayout.value)) {
    discardDraft();
    return;
  }
  const number = ++latestRequest;
  draftLayout.value = layout;
  draftError.value = "";
  busy.value = "predicting";
  try {
    const found = await postJson<LayoutPrediction>("cluster/predict", { devices: partsOf(layout) });
    if (number === latestRequest) prediction.value = found;
  } catch (error) {
    if (number === latestRequest) draftError.value = error instanceof Error ? error.message : String(error);
  }
  if (number === latestRequest) busy.value = "";
}

/** Have the server measure unknown speeds; the predicted time arrives with its next event. */
export async function measure(): Promise<void> {
  const number = ++latestRequest;
  busy.value = "predicting";
  try {
    await postJson<LayoutPrediction>("cluster/predict", { devices: partsOf(currentLayout.value) });
  } catch (error) {
    errorText.value = error instanceof Error ? error.message : String(error);
  }
  if (number === latestRequest) busy.value = "";
}

export function discardDraft(): void {
  latestRequest++;
  draftLayout.value = prediction.value = null;
  draftError.value = busy.value = "";
}

/** Have the server move layers as drafted. */
export async function applyDraft(): Promise<void> {
  if (!draftLayout.value) return;
  const number = ++latestRequest;
  busy.value = "moving";
  try {
    cluster.value = await postJson<ClusterBody>("cluster/layers", { devices: partsOf(draftLayout.value) });
    if (number === latestRequest) discardDraft();
  } catch (error) {
    if (number !== latestRequest) return;
    busy.value = "";
    draftError.value = error instanceof Error ? error.message : String(error);
  }
}
