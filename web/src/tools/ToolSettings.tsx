import { useEffect, useRef, useState } from "preact/hooks";
import { props } from "../api/server";
import type { Settings } from "../chat/settings";
import { shown } from "../markdown/visible";
import { Icon } from "../ui/Icon";
import { add, addresses, connect, remove, states } from "./mcp";
import type { RunnableTool } from "./mcp";
import { serverTools } from "./offered";

interface Given {
  settings: Settings;
  onChange: (changes: Partial<Settings>) => void;
}

function withName(names: readonly string[], name: string, wanted: boolean): string[] {
  const others = names.filter((one) => one !== name);
  return wanted ? [...others, name] : others;
}

/** Which tools the model is told of, and which of those run without being asked about. */
export function ToolSettings({ settings, onChange }: Given) {
  const proxied = props.value.cors_proxy_enabled === true;
  useEffect(() => {
    if (proxied) void connect();
  }, [proxied, addresses.value]);
  if (!serverTools.value.length && !proxied) return null;
  return (
    <fieldset class="tools">
      <legend>Tools</legend>
      {serverTools.value.map((tool) => (
        <ToolRow key={tool.name} tool={tool} settings={settings} onChange={onChange} />
      ))}
      {proxied && <Servers />}
    </fieldset>
  );
}

function ToolRow({ tool, settings, onChange }: Given & { tool: RunnableTool }) {
  const { name } = tool;
  const isOffered = settings.serverTools.includes(name);
  return (
    <div class="tool-row" title={`${tool.description}\n(${tool.where})`}>
      <label class="check">
        <input
          type="checkbox"
          checked={isOffered}
          onChange={(event) => {
            const wanted = event.currentTarget.checked;
            onChange({
              serverTools: withName(settings.serverTools, name, wanted),
              autoTools: withName(settings.autoTools, name, false),
            });
          }}
        />
        {shown(name)}
      </label>
      {isOffered && (
        <label class="check by-itself">
          <input
            type="checkbox"
            checked={settings.autoTools.includes(name)}
            aria-label={`${name} runs by itself`}
            onChange={(event) => onChange({ autoTools: withName(settings.autoTools, name, event.currentTarget.checked) })}
          />
          by itself{tool.writes ? " (may change things)" : ""}
        </label>
      )}
    </div>
  );
}

function Servers() {
  const field = useRef<HTMLInputElement>(null);
  const [wrong, setWrong] = useState("");
  function submit(event: Event) {
    event.preventDefault();
    try {
      add(field.current!.value);
      field.current!.value = "";
      setWrong("");
    } catch (error) {
      setWrong(error instanceof TypeError ? "this is no address" : (error as Error).message);
    }
  }
  return (
    <div class="mcp">
      {addresses.value.map((address) => {
        const now = states.value[address];
        return (
          <div key={address} class="mcp-row">
            <span class="where">{shown(address)}</span>
            <small role="status">
              {now?.state === "ready" ? `${now.tools.length} tool${now.tools.length === 1 ? "" : "s"}` : now?.state === "failed" ? shown(now.why) : "asked…"}
            </small>
            {now?.state === "failed" && (
              <button class="quiet small" type="button" onClick={() => void connect(true)}>
                Try again
              </button>
            )}
            <button class="quiet small" type="button" aria-label={`Remove ${address}`} onClick={() => remove(address)}>
              <Icon name="close" />
            </button>
          </div>
        );
      })}
      <form class="row" onSubmit={submit}>
        <input ref={field} type="text" inputMode="url" aria-label="Address of an MCP server" placeholder="http://127.0.0.1:9000/mcp" />
        <button type="submit">Add</button>
      </form>
      {wrong && <small role="alert">{wrong}</small>}
    </div>
  );
}
