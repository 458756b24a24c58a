import { Markdown } from "../markdown/Markdown";
import type { Message } from "./tree";

/** Reasoning content of an answer: open while the model thinks, folded afterwards. */
export function Reasoning({ message, isStreaming }: { message: Message; isStreaming: boolean }) {
  const { reasoning, content, thoughtMs } = message;
  if (!reasoning) return null;
  const thinks = isStreaming && !content;
  const took = thoughtMs && thoughtMs >= 100 ? ` for ${(thoughtMs / 1000).toFixed(1)} s` : "";
  return (
    <details class="thinking" open={thinks}>
      <summary>{thinks ? "Thinking…" : `Thought${took}`}</summary>
      <Markdown text={reasoning} isComplete={!isStreaming} />
    </details>
  );
}
