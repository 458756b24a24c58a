import { Markdown } from "../markdown/Markdown";
import type { Message } from "./tree";

/** What the model thought before it answered: open while it thinks, folded behind that. */
export function Thoughts({ message, grows }: { message: Message; grows: boolean }) {
  const { reasoning, content, thoughtMs } = message;
  if (!reasoning) return null;
  const thinks = grows && !content;
  const took = thoughtMs && thoughtMs >= 100 ? ` for ${(thoughtMs / 1000).toFixed(1)} s` : "";
  return (
    <details class="thinking" open={thinks}>
      <summary>{thinks ? "Thinking…" : `Thought${took}`}</summary>
      <Markdown text={reasoning} settled={!grows} />
    </details>
  );
}
