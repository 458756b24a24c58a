import { useRef } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { serverTools } from "../tools/catalog";
import type { RunnableTool } from "../tools/mcp";
import { Icon } from "../ui/Icon";
import { runningCalls, runCall, sendResult } from "./callTools";
import { shownPath } from "./store";
import { busy } from "./tasks";
import type { Message, ToolCall } from "./tree";

function prettyJson(json: string): string {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

/** Tool calls of a message, each with its result or a form for it. */
export function ToolCalls({ message }: { message: Message }) {
  const results = shownPath.value.filter((one) => one.role === "tool");
  return (
    <div class="tool-calls">
      {message.toolCalls!.map((call) => {
        const result = results.find((one) => one.toolCallId === call.id);
        return (
          <div key={call.id} class="tool-call">
            <div class="calls">
              <Icon name="tool" /> {labels.value.chat.calls}<code>{displayText(call.name)}</code>
            </div>
            <pre tabIndex={0}>{displayText(prettyJson(call.arguments))}</pre>
            {!result && <RunButton message={message} call={call} />}
            {!result && <ResultForm message={message} call={call} />}
          </div>
        );
      })}
    </div>
  );
}

function runLabel({ address }: RunnableTool): string {
  return address ? labels.value.chat.runAt(address) : labels.value.chat.runOnServer;
}

function RunButton({ message, call }: { message: Message; call: ToolCall }) {
  const tool = serverTools.value.find((one) => one.name === call.name);
  if (!tool) return null;
  const runs = runningCalls.value.has(call.id);
  return (
    <button class="primary run" type="button" disabled={runs || busy.value} onClick={() => void runCall(message, call)}>
      {runs ? labels.value.chat.running : runLabel(tool)}
    </button>
  );
}

function ResultForm({ message, call }: { message: Message; call: ToolCall }) {
  const field = useRef<HTMLTextAreaElement>(null);
  function submit(event: Event) {
    event.preventDefault();
    void sendResult(message, call.id, field.current!.value);
  }
  return (
    <form class="result-form" onSubmit={submit}>
      <label for={`result-${call.id}`}>{displayText(labels.value.chat.resultOf(call.name))}</label>
      <textarea id={`result-${call.id}`} ref={field} rows={2} />
      <button type="submit" disabled={busy.value}>
        {labels.value.chat.sendResult}
      </button>
    </form>
  );
}
