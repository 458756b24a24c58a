import { useEffect, useState } from "preact/hooks";
import { isModelLoaded, modelFor } from "../api/server";
import { labels } from "../text";
import { ToolSettings } from "../tools/ToolSettings";
import { Icon } from "../ui/Icon";
import { useDraft } from "../ui/draft";
import { JsonField } from "./JsonField";
import { Parameters } from "./Parameters";
import { parameters, readParameters } from "./parameters";
import { PreferenceFields } from "./PreferenceFields";
import { PresetPicker } from "./PresetPicker";
import { NO_SETTINGS, type Settings } from "./settings";
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
  const isLoaded = isModelLoaded(model);
  useEffect(() => {
    setReadError(isLoaded ? "" : t.modelNotLoaded);
    if (isLoaded) readParameters(model).catch((error: Error) => setReadError(t.notLoaded(error.message)));
  }, [model, isLoaded]);
  const [resets, setResets] = useState(0);
  const system = useDraft(settings.system, (text) => onChange({ system: text }));
  const probs = useDraft(settings.probs, (text) => onChange({ probs: Math.max(0, Math.trunc(Number(text) || 0)) }));
  const advanced = {
    [t.schema]: (
      <JsonField label={t.schema} placeholder='{"type": "object", …}' value={settings.schema} onChange={(schema) => onChange({ schema })} />
    ),
    [t.likelyTokens]: (
      <label>
        {t.likelyTokens}
        <input type="number" min={0} max={20} {...probs} />
        {settings.probs > 0 && (settings.serverTools.length > 0 || settings.tools.trim() !== "") && <small class="hint">{t.notWithTools}</small>}
      </label>
    ),
    ...(chat && {
      [t.moreTools]: (
        <JsonField
          label={t.moreTools}
          placeholder='[{"type": "function", "function": {"name": …}}]'
          value={settings.tools}
          onChange={(tools) => onChange({ tools })}
        />
      ),
    }),
  };
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
      {chat && <PresetPicker settings={settings} onChoose={(preset) => onChange({ ...NO_SETTINGS, ...preset })} />}
      {chat && (
        <label>
          {t.systemPrompt}
          <textarea rows={3} {...system} />
        </label>
      )}
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
        advanced={advanced}
      >
        {chat && <ToolSettings settings={settings} onChange={onChange} />}
      </Parameters>
      {chat && <PreferenceFields />}
    </aside>
  );
}
