// The complete view: continue a raw text in place, without messages or a chat template.
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";
import { ModelPicker } from "../chat/ModelPicker";
import { Probabilities } from "../chat/Probabilities";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { persistentSignal } from "../ui/persistent";
import { Outcome, Panel } from "./Panel";
import { changeSettings, Run, settings } from "./run";
import "../chat/chat.css";
import "./complete.css";

const run = new Run("completion");
const text = persistentSignal("complete.text", "");
/** The text before the last continuation. */
const before = signal<string | null>(null);

export function Complete() {
  const t = labels.value.complete;
  const [panel, setPanel] = useState(false);
  const [probs, setProbs] = useState(false);
  const field = useRef<HTMLTextAreaElement>(null);
  const busy = run.busy.value;
  const found = run.latest.value;
  const shownText = busy && before.value !== null ? before.value + (found?.text ?? "") : text.value;
  useEffect(() => {
    const area = field.current;
    if (busy && area) area.scrollTop = area.scrollHeight;
  }, [busy, shownText]);

  async function complete(start: string) {
    if (run.busy.value) return;
    before.value = start;
    setProbs(false);
    await run.start({ prompt: start });
    text.value = start + (run.latest.value?.text ?? "");
  }

  const showsProbs = probs && !busy && before.value !== null && found !== null && found.probs.length > 0;
  return (
    <div class={`complete ${panel ? "shows-settings" : ""}`}>
      <section
        class="conversation"
        aria-label={t.completion}
        onKeyDown={(event) => {
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void complete(text.value);
          else if (event.key === "Escape" && busy) run.stop();
        }}
      >
        <div class="chat-bar">
          <h1>{t.title}</h1>
          <ModelPicker chosen={settings.value.model} onChoose={(model) => changeSettings({ model })} />
          <button class="quiet" type="button" aria-expanded={panel} onClick={() => setPanel(!panel)}>
            <Icon name="sliders" /> <span class="word">{labels.value.common.settings}</span>
          </button>
        </div>
        <p class="about">{t.about}</p>
        {showsProbs ? (
          <div class="written" tabIndex={0} role="group" aria-label={t.tokenProbabilities}>
            {displayText(before.value!)}
            <Probabilities tokens={found.probs} />
          </div>
        ) : (
          <textarea
            ref={field}
            class="written"
            aria-label={t.text}
            placeholder={t.placeholder}
            dir="auto"
            spellcheck={false}
            value={shownText}
            readOnly={busy}
            onInput={(event) => {
              text.value = event.currentTarget.value;
              before.value = null;
            }}
          />
        )}
        <div class="complete-foot">
          {busy ? (
            <button class="primary" type="button" onClick={() => run.stop()}>
              {labels.value.common.stop}
            </button>
          ) : (
            <button class="primary" type="button" title={t.shortcut} onClick={() => void complete(text.value)}>
              {t.complete}
            </button>
          )}
          <button type="button" disabled={busy || before.value === null} onClick={() => void complete(before.value!)}>
            {t.retry}
          </button>
          <button
            type="button"
            disabled={busy || before.value === null}
            onClick={() => {
              text.value = before.value!;
              before.value = null;
              setProbs(false);
            }}
          >
            {t.undo}
          </button>
          {found !== null && found.probs.length > 0 && before.value !== null && (
            <button type="button" disabled={busy} aria-pressed={probs} onClick={() => setProbs(!probs)}>
              {labels.value.common.probabilities}
            </button>
          )}
          <Outcome of={run} />
        </div>
      </section>
      {panel && <Panel onClose={() => setPanel(false)} />}
    </div>
  );
}
