import { useEffect, useId, useState } from "preact/hooks";
import { modelFor } from "../api/server";
import { labels } from "../text";
import { ToolSettings } from "../tools/ToolSettings";
import { Icon } from "../ui/Icon";
import { useDraft } from "../ui/draft";
import { describe, type Group, GROUPS, type Parameter, parameters, parseValue, readParameters, formatValue } from "./parameters";
import type { Settings } from "./settings";
import { changeSettings, shownSettings } from "./store";

interface Props {
  onClose?: () => void;
  settings?: Settings;
  onChange?: (changes: Partial<Settings>) => void;
  title?: string;
  /** False for raw text, which has no system prompt and no tools. */
  chat?: boolean;
}

/** Settings of a request; by default those of the current conversation. */
export function SettingsPanel({
  onClose,
  settings = shownSettings(),
  onChange = (one) => void changeSettings(one),
  title = labels.value.common.settings,
  chat = true,
}: Props) {
  const t = labels.value.settings;
  const model = modelFor(settings.model);
  const [readError, setReadError] = useState("");
  useEffect(() => {
    setReadError("");
    readParameters(model).catch((error: Error) => setReadError(error.message));
  }, [model]);
  const [resets, setResets] = useState(0);
  const system = useDraft(settings.system, (text) => onChange({ system: text }));
  const probs = useDraft(settings.probs, (text) => onChange({ probs: Math.max(0, Math.trunc(Number(text) || 0)) }));
  return (
    <aside class="settings" aria-label={title}>
      <div class="row">
        <h2>{title}</h2>
        {onClose && (
          <button class="quiet" type="button" aria-label={t.close} onClick={onClose}>
            <Icon name="close" />
          </button>
        )}
      </div>
      {chat && (
        <label>
          {t.systemPrompt}
          <textarea rows={3} {...system} />
        </label>
      )}
      <JsonField label={t.schema} placeholder='{"type": "object", …}' value={settings.schema} onChange={(schema) => onChange({ schema })} />
      {chat && <ToolSettings settings={settings} onChange={onChange} />}
      {chat && (
        <JsonField
          label={t.moreTools}
          placeholder='[{"type": "function", "function": {"name": …}}]'
          value={settings.tools}
          onChange={(tools) => onChange({ tools })}
        />
      )}
      <label>
        {t.likelyTokens}
        <input type="number" min={0} max={20} {...probs} />
        {settings.probs > 0 && (settings.serverTools.length > 0 || settings.tools.trim() !== "") && (
          <small class="hint">{t.notWithTools}</small>
        )}
      </label>
      <Parameters
        key={resets}
        all={(parameters.value[model] ?? []).filter((one) => one.only === undefined || one.only === (chat ? "chat" : "text"))}
        readError={readError}
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

/** A field for JSON that shows parse errors while the user types. */
function JsonField({ label, placeholder, value, onChange }: { label: string; placeholder: string; value: string; onChange: (text: string) => void }) {
  const draft = useDraft(value, onChange);
  const wrong = jsonError(String(draft.value));
  return (
    <label>
      {label}
      <textarea rows={2} class="mono" spellcheck={false} placeholder={placeholder} aria-invalid={wrong !== ""} {...draft} />
      {wrong && <small class="wrong">{wrong}</small>}
    </label>
  );
}

function jsonError(text: string): string {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return labels.value.settings.invalidJson((error as Error).message);
  }
}

interface ParametersProps {
  all: Parameter[];
  /** Reason why the parameters could not be loaded; "" if they are loaded or loading. */
  readError: string;
  values: Record<string, unknown>;
  onChange: (name: string, value: unknown) => void;
  onReset: () => void;
}

/** Groups that are unfolded at first. */
const UNFOLDED: readonly Group[] = ["sampling", "length"];

/** The server's parameters by group, searchable by name and description. */
function Parameters({ all, readError, values, onChange, onReset }: ParametersProps) {
  const t = labels.value.settings;
  const id = useId();
  const [text, setText] = useState("");
  const query = text.trim().toLowerCase();
  const found = all.filter((one) => !query || `${one.name} ${describe(one)}`.toLowerCase().includes(query));
  const changed = Object.keys(values).length;
  return (
    <section class="parameters" aria-label={t.parameters}>
      <div class="row">
        <h3>{t.parameters}</h3>
        {changed > 0 && (
          <button class="quiet small" type="button" onClick={onReset}>
            <Icon name="again" /> {t.reset}
          </button>
        )}
      </div>
      {all.length > 0 && (
        <input
          type="search"
          placeholder={t.find}
          aria-label={t.find}
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
        />
      )}
      {!all.length && <p class="hint">{readError ? t.notLoaded(readError) : labels.value.common.loading}</p>}
      {all.length > 0 && !found.length && <p class="hint">{t.noneFound}</p>}
      {GROUPS.map((group) => {
        const here = found.filter((one) => one.group === group);
        const others = here.filter((one) => one.name in values).length;
        return here.length ? (
          <details key={group} open={query !== "" || UNFOLDED.includes(group)}>
            <summary>
              {t.groups[group]} {others > 0 && <span class="count">{t.changed(others)}</span>}
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

interface FieldProps {
  id: string;
  parameter: Parameter;
  value: unknown;
  onChange: (value: unknown) => void;
}

function Field({ id, parameter, value, onChange }: FieldProps) {
  const t = labels.value.settings;
  const [wrong, setWrong] = useState("");
  const { name, kind } = parameter;
  const description = describe(parameter);
  const usual = formatValue(parameter.default);
  const draft = useDraft(formatValue(value), (text) => {
    try {
      onChange(parseValue(parameter, text));
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
          <option value="">{usual ? t.defaultIs(usual) : t.default}</option>
          <option value="true">{t.true}</option>
          <option value="false">{t.false}</option>
        </select>
      ) : (
        <input
          id={id}
          type="text"
          spellcheck={false}
          autocomplete="off"
          inputMode={kind === "number" || kind === "integer" ? "decimal" : "text"}
          placeholder={usual || t.notSet}
          {...draft}
          aria-invalid={wrong !== ""}
          aria-describedby={`${id}-about`}
        />
      )}
      <small id={`${id}-about`}>{wrong || description}</small>
    </div>
  );
}
