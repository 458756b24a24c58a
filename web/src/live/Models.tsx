import { useSignal } from "@preact/signals";
import { ApiFailure, postJson } from "../api/http";
import type { RoutedModel } from "./state";

/** The models of a router, with buttons to load and unload them. */
export function Models({ models, chosen, onChoose }: { models: RoutedModel[]; chosen: string; onChoose: (id: string) => void }) {
  const errorText = useSignal("");

  async function change(what: "load" | "unload", model: string): Promise<void> {
    errorText.value = "";
    try {
      await postJson(`models/${what}`, { model });
    } catch (error) {
      if (!(error instanceof ApiFailure)) throw error;
      errorText.value = `${model}: ${error.message}`;
    }
  }

  return (
    <section aria-labelledby="live-models">
      <h2 id="live-models">Models</h2>
      {errorText.value && (
        <p class="notice" role="alert">
          {errorText.value}
        </p>
      )}
      <ul class="models">
        {models.map((one) => {
          const loaded = one.state === "loaded" || one.state === "sleeping";
          const runs = loaded || one.state === "loading";
          return (
            <li key={one.id} data-model={one.id} class={one.id === chosen ? "chosen" : ""}>
              <div class="model-name">
                <strong>{one.name || one.id}</strong>
                <span class={`tag ${one.state}`}>
                  {one.state}
                  {one.progress !== undefined && ` ${Math.round(one.progress * 100)}%`}
                </span>
              </div>
              <p class="model-facts">
                {one.failure
                  ? `failed: ${one.failure}`
                  : runs
                    ? [
                        one.pid && `process ${one.pid}`,
                        `${one.requests} request${one.requests === 1 ? "" : "s"}`,
                        one.waiting && `${one.waiting} waiting`,
                        one.restarts && `${one.restarts} restarts`,
                      ]
                        .filter(Boolean)
                        .join(", ")
                    : "not loaded"}
              </p>
              <div class="model-buttons">
                {runs ? (
                  <button type="button" aria-label={`Unload ${one.id}`} onClick={() => void change("unload", one.id)}>
                    Unload
                  </button>
                ) : (
                  <button type="button" aria-label={`Load ${one.id}`} disabled={one.state === "stopping"} onClick={() => void change("load", one.id)}>
                    Load
                  </button>
                )}
                {loaded && (
                  <button type="button" aria-label={`Show ${one.id}`} aria-pressed={one.id === chosen} onClick={() => onChoose(one.id)}>
                    Show
                  </button>
                )}
              </div>
            </li>
          );
        })}
      </ul>
      {!models.length && <p class="nothing">No models.</p>}
    </section>
  );
}
