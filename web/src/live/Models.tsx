import { useSignal } from "@preact/signals";
import { ApiFailure, postJson } from "../api/http";
import type { RoutedModel } from "./state";

/** The models of a router: what each one does, and buttons that load and unload it. */
export function Models({ models, chosen, onChoose }: { models: RoutedModel[]; chosen: string; onChoose: (id: string) => void }) {
  const trouble = useSignal("");

  async function change(what: "load" | "unload", model: string): Promise<void> {
    trouble.value = "";
    try {
      await postJson(`models/${what}`, { model });
    } catch (error) {
      if (!(error instanceof ApiFailure)) throw error;
      trouble.value = `${model}: ${error.message}`;
    }
  }

  return (
    <section aria-labelledby="live-models">
      <h2 id="live-models">Models</h2>
      {trouble.value && (
        <p class="notice" role="alert">
          {trouble.value}
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
                    : "takes no memory"}
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
                  <button type="button" aria-label={`Look into ${one.id}`} aria-pressed={one.id === chosen} onClick={() => onChoose(one.id)}>
                    Look into it
                  </button>
                )}
              </div>
            </li>
          );
        })}
      </ul>
      {!models.length && <p class="nothing">There are no models.</p>}
    </section>
  );
}
