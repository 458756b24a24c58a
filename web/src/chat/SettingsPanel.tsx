import { useEffect, useId, useState } from "preact/hooks";
import { models } from "../api/server";
import { ToolSettings } from "../tools/ToolSettings";
import { Icon } from "../ui/Icon";
import { useDraft } from "../ui/draft";
import { type Parameter, parameters, read, readParameters, write } from "./parameters";
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
  useEffect(() => void readParameters(settings.model).catch(() => undefined), [settings.model]);
  const id = useId();
  const [resets, setResets] = useState(0);
  const system = useDraft(settings.system, (text) => onChange({ system: text }));
  const schema = useDraft(settings.schema, (text) => onChange({ schema: text }));
  const tools = useDraft(settings.tools, (text) => onChange({ tools: text }));
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
      {models.value.length > 1 && (
        <label>
          Model
          <select value={settings.model} onChange={(event) => onChange({ model: event.currentTarget.value })}>
            <option value="">Choose…</option>
            {models.value.map((one) => (
              <option key={one.id} value={one.id}>
                {one.id}
                {one.status && one.status.value !== "loaded" ? ` (${one.status.value})` : ""}
              </option>
            ))}
          </select>
        </label>
      )}
      {chat && (
        <label>
          System prompt
          <textarea rows={3} {...system} />
        </label>
      )}
      <label>
        JSON schema of the answer
        <textarea
          rows={2}
          class="mono"
          placeholder='{"type": "object", …}'
          {...schema}
        />
      </label>
      {chat && <ToolSettings settings={settings} onChange={onChange} />}
      {chat && (
        <label>
          Further tools
          <textarea
            rows={2}
            class="mono"
            placeholder='[{"type": "function", "function": {"name": …}}]'
            {...tools}
          />
        </label>
      )}
      <label>
        Probabilities: likeliest tokens at each place
        <input type="number" min={0} max={20} {...probs} />
      </label>
      <fieldset>
        <legend>Parameters</legend>
        {(parameters.value[settings.model] ?? [])
          .filter((one) => chat || !one.chat)
          .map((one) => (
          <Field
            key={`${one.name} ${resets}`}
            id={`${id}-${one.name}`}
            parameter={one}
            value={settings.parameters[one.name]}
            onChange={(value) => {
              const { [one.name]: _, ...others } = settings.parameters;
              onChange({ parameters: value === undefined ? others : { ...others, [one.name]: value } });
            }}
          />
        ))}
        {Object.keys(settings.parameters).length > 0 && (
          <button
            type="button"
            onClick={() => {
              setResets(resets + 1);
              onChange({ parameters: {} });
            }}
          >
            All as the server has it
          </button>
        )}
      </fieldset>
    </aside>
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
          <option value="">{usual || "as it is"}</option>
          <option value="true">true</option>
          <option value="false">false</option>
        </select>
      ) : (
        <input
          id={id}
          type="text"
          inputMode={kind === "number" || kind === "integer" ? "decimal" : "text"}
          placeholder={usual}
          {...draft}
          aria-invalid={wrong !== ""}
          aria-describedby={`${id}-about`}
        />
      )}
      <small id={`${id}-about`}>{wrong || description}</small>
    </div>
  );
}
