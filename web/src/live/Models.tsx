import { useSignal } from "@preact/signals";
import { ApiFailure, postJson } from "../api/http";
import { labels } from "../text";
import type { RoutedModel } from "./state";

/** The models of a router, with buttons to load and unload them. */
export function Models({ models, chosen, onChoose }: { models: RoutedModel[]; chosen: string; onChoose: (id: string) => void }) {
  const t = labels.value.live;
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
      <h2 id="live-models">{t.models}</h2>
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
                  {labels.value.common.modelState[one.state] ?? one.state}
                  {one.progress !== undefined && ` ${Math.round(one.progress * 100)}%`}
                </span>
              </div>
              <p class="model-facts">
                {one.failure
                  ? t.failed(one.failure)
                  : runs
                    ? [
                        one.pid && t.process(one.pid),
                        t.requestCount(one.requests),
                        one.waiting && t.requestsWaiting(one.waiting),
                        one.restarts && t.restarts(one.restarts),
                      ]
                        .filter(Boolean)
                        .join(", ")
                    : ""}
              </p>
              <div class="model-buttons">
                {runs ? (
                  <button type="button" aria-label={t.unloadModel(one.id)} onClick={() => void change("unload", one.id)}>
                    {t.unload}
                  </button>
                ) : (
                  <button type="button" aria-label={t.loadModel(one.id)} disabled={one.state === "stopping"} onClick={() => void change("load", one.id)}>
                    {t.load}
                  </button>
                )}
                {loaded && (
                  <button type="button" aria-label={t.showModel(one.id)} aria-pressed={one.id === chosen} onClick={() => onChoose(one.id)}>
                    {t.show}
                  </button>
                )}
              </div>
            </li>
          );
        })}
      </ul>
      {!models.length && <p class="nothing">{t.noModels}</p>}
    </section>
  );
}
