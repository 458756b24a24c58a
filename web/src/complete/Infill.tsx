// The infill view: fill the gap between two texts, with models that were trained for it.
import { useRef, useState } from "preact/hooks";
import { AttachmentChips } from "../chat/AttachmentChips";
import { readAttachment } from "../chat/attachments";
import { ModelPicker } from "../chat/ModelPicker";
import { Probabilities } from "../chat/Probabilities";
import type { TextFile } from "../chat/tree";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { persistentSignal } from "../ui/persistent";
import { Outcome, Panel } from "./Panel";
import { changeSettings, Run, settings } from "./run";
import "../chat/chat.css";
import "./complete.css";

const run = new Run("infill");
const prefix = persistentSignal("infill.prefix", "");
const suffix = persistentSignal("infill.suffix", "");

export function Infill() {
  const t = labels.value.infill;
  const [panel, setPanel] = useState(false);
  const [probs, setProbs] = useState(false);
  const [around, setAround] = useState<TextFile[]>([]);
  const [status, setStatus] = useState("");
  const [filled, setFilled] = useState(false);
  /** The text before the gap, before the last insertion. */
  const [previous, setPrevious] = useState<string | null>(null);
  const file = useRef<HTMLInputElement>(null);
  const busy = run.busy.value;
  const found = filled ? run.latest.value : null;

  async function fill() {
    setProbs(false);
    setFilled(true);
    setPrevious(null);
    const extra = around.map(({ name, text }) => ({ filename: name, text }));
    await run.start({ input_prefix: prefix.value, input_suffix: suffix.value, input_extra: extra, prompt: "" });
  }

  async function add(files: Iterable<File>) {
    for (const one of files) {
      try {
        const read = await readAttachment(one);
        setAround((before) => [...before, read]);
        setStatus("");
      } catch (error) {
        setStatus(`${one.name}: ${error instanceof Error ? error.message : String(error)}`);
      }
    }
    file.current!.value = "";
  }

  return (
    <div class={`complete ${panel ? "shows-settings" : ""}`}>
      <section
        class="conversation infill"
        aria-label={t.title}
        onKeyDown={(event) => {
          if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) void fill();
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
        <label>
          {t.before}
          <textarea
            class="mono"
            rows={9}
            spellcheck={false}
            placeholder={"def area(radius):\n    "}
            value={prefix.value}
            onInput={(event) => {
              prefix.value = event.currentTarget.value;
              setPrevious(null);
            }}
          />
        </label>
        <div class="gap">
          <span>{t.between}</span>
          {probs && found?.probs.length ? (
            <Probabilities tokens={found.probs} />
          ) : (
            <pre class="between" tabIndex={0} aria-label={t.between} data-empty={t.empty} role="region" aria-busy={busy}>
              {displayText(found?.text ?? "")}
            </pre>
          )}
        </div>
        <label>
          {t.after}
          <textarea
            class="mono"
            rows={5}
            spellcheck={false}
            placeholder={"\nprint(area(2))"}
            value={suffix.value}
            onInput={(event) => (suffix.value = event.currentTarget.value)}
          />
        </label>
        <div class="attachments">
          <button type="button" onClick={() => file.current?.click()}>
            <Icon name="file" /> {t.addFiles}
          </button>
          <input
            ref={file}
            hidden
            type="file"
            multiple
            aria-label={t.files}
            onChange={(event) => void add([...(event.currentTarget.files ?? [])])}
          />
          <AttachmentChips files={around} onChange={setAround} />
          <span role="status">{status}</span>
        </div>
        <div class="complete-foot">
          {busy ? (
            <button class="primary" type="button" onClick={() => run.stop()}>
              {labels.value.common.stop}
            </button>
          ) : (
            <button class="primary" type="button" title={labels.value.complete.shortcut} onClick={() => void fill()}>
              {t.fill}
            </button>
          )}
          <button
            type="button"
            disabled={busy || !found?.text}
            onClick={() => {
              setPrevious(prefix.value);
              prefix.value += found!.text;
              setFilled(false);
            }}
          >
            {t.insert}
          </button>
          <button
            type="button"
            disabled={busy || previous === null}
            onClick={() => {
              prefix.value = previous!;
              setPrevious(null);
              setFilled(true);
            }}
          >
            {t.undo}
          </button>
          {found !== null && found.probs.length > 0 && (
            <button type="button" disabled={busy} aria-pressed={probs} onClick={() => setProbs(!probs)}>
              {labels.value.common.probabilities}
            </button>
          )}
          {(filled || busy) && <Outcome of={run} />}
        </div>
      </section>
      {panel && <Panel onClose={() => setPanel(false)} />}
    </div>
  );
}
