import { useEffect, useRef, useState } from "preact/hooks";
import { props } from "../api/server";
import type { Settings } from "../chat/settings";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { addServer, addresses, connectServers, removeServer, states } from "./mcp";
import type { RunnableTool } from "./mcp";
import { serverTools } from "./catalog";

interface Props {
  settings: Settings;
  onChange: (changes: Partial<Settings>) => void;
}

function withName(names: readonly string[], name: string, isIncluded: boolean): string[] {
  const others = names.filter((one) => one !== name);
  return isIncluded ? [...others, name] : others;
}

/** Enables tools for the model, and automatic runs for each. */
export function ToolSettings({ settings, onChange }: Props) {
  const proxied = props.value.cors_proxy_enabled === true;
  useEffect(() => {
    if (proxied) void connectServers();
  }, [proxied, addresses.value]);
  if (!serverTools.value.length && !proxied) return null;
  return (
    <fieldset class="tools">
      <legend>{labels.value.tools.title}</legend>
      {serverTools.value.map((tool) => (
        <ToolRow key={tool.name} tool={tool} settings={settings} onChange={onChange} />
      ))}
      {proxied && <Servers />}
    </fieldset>
  );
}

function ToolRow({ tool, settings, onChange }: Props & { tool: RunnableTool }) {
  const t = labels.value.tools;
  const { name } = tool;
  const isOffered = settings.serverTools.includes(name);
  return (
    <div class="tool-row" title={`${tool.description}\n(${tool.address ? t.at(tool.address) : t.onServer})`}>
      <label class="check">
        <input
          type="checkbox"
          checked={isOffered}
          onChange={(event) => {
            const isIncluded = event.currentTarget.checked;
            onChange({
              serverTools: withName(settings.serverTools, name, isIncluded),
              autoTools: withName(settings.autoTools, name, false),
            });
          }}
        />
        {displayText(name)}
      </label>
      {isOffered && (
        <label class="check by-itself">
          <input
            type="checkbox"
            checked={settings.autoTools.includes(name)}
            aria-label={t.runAutomatically(name)}
            onChange={(event) => onChange({ autoTools: withName(settings.autoTools, name, event.currentTarget.checked) })}
          />
          {tool.writes ? t.automaticWrites : t.automatic}
        </label>
      )}
    </div>
  );
}

function Servers() {
  const t = labels.value.tools;
  const field = useRef<HTMLInputElement>(null);
  const [wrong, setWrong] = useState("");
  function submit(event: Event) {
    event.preventDefault();
    try {
      addServer(field.current!.value);
      field.current!.value = "";
      setWrong("");
    } catch (error) {
      setWrong(error instanceof TypeError ? t.invalidUrl : (error as Error).message);
    }
  }
  return (
    <div class="mcp">
      {addresses.value.map((address) => {
        const now = states.value[address];
        return (
          <div key={address} class="mcp-row">
            <span class="where">{displayText(address)}</span>
            <small role="status">
              {now?.state === "ready" ? t.tools(now.tools.length) : now?.state === "failed" ? displayText(now.why) : t.connecting}
            </small>
            {now?.state === "failed" && (
              <button class="quiet small" type="button" onClick={() => void connectServers(true)}>
                {labels.value.common.tryAgain}
              </button>
            )}
            <button class="quiet small" type="button" aria-label={labels.value.common.remove(address)} onClick={() => removeServer(address)}>
              <Icon name="close" />
            </button>
          </div>
        );
      })}
      <form class="row" onSubmit={submit}>
        <input ref={field} type="text" inputMode="url" aria-label={t.mcpUrl} placeholder="http://127.0.0.1:9000/mcp" />
        <button type="submit">{t.add}</button>
      </form>
      {wrong && <small role="alert">{wrong}</small>}
    </div>
  );
}
