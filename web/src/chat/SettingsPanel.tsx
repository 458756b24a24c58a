import { useEffect, useId, useState } from "preact/hooks";
import { modelFor } from "../api/server";
import { ToolSettings } from "../tools/ToolSettings";
import { Icon } from "../ui/Icon";
import { useDraft } from "../ui/draft";
import { type Group, GROUPS, type Parameter, parameters, read, readParameters, write } from "./parameters";
import type { Settings } from "./settings";
import { changeSettings, shownSettings } from "./store";

interface Given {
  onClose?: () => void;
  settings?: Settings;
  onChange?: (changes: Partial<Settings>) => void;
  title?: string;
  /** Whether messages are asked about; a text alone has no system prompt and no tools. */
  chat?: boolean;
}

/** What is asked of the model; without `settings` those of the conversation that is shown. */
export function SettingsPanel({
  onClose,
  settings = shownSettings(),
  onChange = (one) => void changeSettings(one),
  title = "Settings",
  chat = true,
}: Given) {
  const model = modelFor(settings.model);
  const [unread, setUnread] = useState("");
  useEffect(() => {
    setUnread("");
    readParameters(model).catch((error: Error) => setUnread(error.message));
  }, [model]);
  const [resets, setResets] = useState(0);
  const system = useDraft(settings.system, (text) => onChange({ system: text }));
  const probs = useDraft(settings.probs, (text) => onChange({ probs: Math.max(0, Math.trunc(Number(text) || 0)) }));
  return (
    <aside class="settings" aria-label={title}>
      <div class="row">
        <h2>{title}</h2>
        {onClose && (
          <button class="quiet" type="button" aria-label="Close the settings" onClick={onClose}>
            <Icon name="close" />
          </button>
        )}
      </div>
      {chat && (
        <label>
          System prompt
          <textarea rows={3} {...system} />
        </label>
      )}
      <JsonField label="JSON schema of the answer" placeholder='{"type": "object", …}' value={settings.schema} onChange={(schema) => onChange({ schema })} />
      {chat && <ToolSettings settings={settings} onChange={onChange} />}
      {chat && (
        <JsonField
          label="Further tools"
          placeholder='[{"type": "function", "function": {"name": …}}]'
          value={settings.tools}
          onChange={(tools) => onChange({ tools })}
        />
      )}
      <label>
        Probabilities: likeliest tokens at each place
        <input type="number" min={0} max={20} {...probs} />
        {settings.probs > 0 && (settings.serverTools.length > 0 || settings.tools.trim() !== "") && (
          <small class="hint">The model is told of tools: there are none beside them.</small>
        )}
      </label>
      <Parameters
        key={resets}
        all={(parameters.value[model] ?? []).filter((one) => one.only === undefined || one.only === (chat ? "chat" : "text"))}
        unread={unread}
        values={settings.parameters}
        onChange={(name, value) => {
          const { [name]: _, ...others } = settings.parameters;
          onChange({ parameters: value === undefined ? others : { ...others, [name]: value } });
        }}
        onReset={() => {
          setResets(resets + 1);
          onChange({ parameters: {} });
        }}
      />
    </aside>
  );
}

/** A field of JSON, which says while it is written whether it can be read. */
function JsonField({ label, placeholder, value, onChange }: { label: string; placeholder: string; value: string; onChange: (text: string) => void }) {
  const draft = useDraft(value, onChange);
  const wrong = whyNoJson(String(draft.value));
  return (
    <label>
      {label}
      <textarea rows={2} class="mono" spellcheck={false} placeholder={placeholder} aria-invalid={wrong !== ""} {...draft} />
      {wrong && <small class="wrong">{wrong}</small>}
    </label>
  );
}

function whyNoJson(text: string): string {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return `Not JSON yet: ${(error as Error).message}`;
  }
}

interface ParametersGiven {
  all: Parameter[];
  /** Why they are not there; "": they are, or come. */
  unread: string;
  values: Record<string, unknown>;
  onChange: (name: string, value: unknown) => void;
  onReset: () => void;
}

/** Unfolded from the beginning. */
const FIRST: readonly Group[] = ["Sampling", "Length and end"];

/** The server's table of parameters, by what they are about; found by a part of their name or of what they do. */
function Parameters({ all, unread, values, onChange, onReset }: ParametersGiven) {
  const id = useId();
  const [text, setText] = useState("");
  const wanted = text.trim().toLowerCase();
  const found = all.filter((one) => !wanted || `${one.name} ${one.description}`.toLowerCase().includes(wanted));
  const changed = Object.keys(values).length;
  return (
    <section class="parameters" aria-label="Parameters">
      <div class="row">
        <h3>Parameters</h3>
        {changed > 0 && (
          <button class="quiet small" type="button" onClick={onReset}>
            <Icon name="again" /> All as the server has it
          </button>
        )}
      </div>
      {all.length > 0 && (
        <input
          type="search"
          placeholder="Find a parameter"
          aria-label="Find a parameter"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
        />
      )}
      {!all.length && <p class="hint">{unread ? `The server does not tell them: ${unread}.` : "…"}</p>}
      {all.length > 0 && !found.length && <p class="hint">None is called so.</p>}
      {GROUPS.map((group) => {
        const here = found.filter((one) => one.group === group);
        const others = here.filter((one) => one.name in values).length;
        return here.length ? (
          <details key={group} open={wanted !== "" || FIRST.includes(group)}>
            <summary>
              {group} {others > 0 && <span class="count">{others} changed</span>}
            </summary>
            {here.map((one) => (
              <Field
                key={one.name}
                id={`${id}-${one.name}`}
                parameter={one}
                value={values[one.name]}
                onChange={(value) => onChange(one.name, value)}
              />
            ))}
          </details>
        ) : null;
      })}
    </section>
  );
}

interface FieldGiven {
  id: string;
  parameter: Parameter;
  value: unknown;
  onChange: (value: unknown) => void;
}

function Field({ id, parameter, value, onChange }: FieldGiven) {
  const [wrong, setWrong] = useState("");
  const { name, kind, description } = parameter;
  const usual = write(parameter.default);
  const draft = useDraft(write(value), (text) => {
    try {
      onChange(read(parameter, text));
      setWrong("");
    } catch (error) {
      setWrong(error instanceof Error ? error.message : String(error));
      return false;
    }
    return true;
  });
  return (
    <div class={`parameter ${value === undefined ? "" : "changed"}`}>
      <label for={id} title={description}>
        {name}
      </label>
      {kind === "boolean" ? (
        <select
          id={id}
          value={value === undefined ? "" : String(value)}
          onChange={(event) => onChange({ "": undefined, true: true, false: false }[event.currentTarget.value])}
        >
          <option value="">{usual ? `${usual} (as it is)` : "as it is"}</option>
          <option value="true">true</option>
          <option value="false">false</option>
        </select>
      ) : (
        <input
          id={id}
          type="text"
          spellcheck={false}
          autocomplete="off"
          inputMode={kind === "number" || kind === "integer" ? "decimal" : "text"}
          placeholder={usual || "not set"}
          {...draft}
          aria-invalid={wrong !== ""}
          aria-describedby={`${id}-about`}
        />
      )}
      <small id={`${id}-about`}>{wrong || description}</small>
    </div>
  );
}
