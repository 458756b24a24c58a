import { Markdown } from "../markdown/Markdown";
import { labels } from "../text";
import type { Message } from "./tree";

/** Reasoning content of an answer: open while the model thinks, folded afterwards. */
export function Reasoning({ message, isStreaming }: { message: Message; isStreaming: boolean }) {
  const { reasoning, content, thoughtMs } = message;
  if (!reasoning) return null;
  const thinks = isStreaming && !content;
  const t = labels.value.chat;
  const thought = thoughtMs && thoughtMs >= 100 ? t.thoughtFor(thoughtMs / 1000) : t.thought;
  return (
    <details class="thinking" open={thinks}>
      <summary>{thinks ? t.thinking : thought}</summary>
      <Markdown text={reasoning} isComplete={!isStreaming} />
    </details>
  );
}
