// Error messages for the user, with what to do next.
import { ApiFailure } from "./http";

/** Return a message without its final period. */
function withoutPeriod(text: string): string {
  return text.trim().replace(/[.\s]+$/, "");
}

/** Return what failed and what the user can do. `again` is the action that retries, such as "choose Regenerate". */
export function explain(error: unknown, again: string): string {
  if (!(error instanceof ApiFailure)) return error instanceof Error ? error.message : String(error);
  const { message, status, type } = error;
  if (status === 0) return `${message} Check that it is running, then ${again}.`;
  if (status === 401) return `The server needs an API key. Enter it, then ${again}.`;
  if (type === "exceed_context_size_error") {
    return `This is longer than the model's context: ${withoutPeriod(message)}. Shorten it, start a new chat, or restart the server with a larger --ctx-size.`;
  }
  if (status === 413) {
    return `This chat is larger than the server accepts: ${withoutPeriod(message)}. Delete messages with pictures or sounds, or start a new chat.`;
  }
  if (status === 503 && message.startsWith("Loading model")) return `The model is still loading. Wait until it is ready, then ${again}.`;
  if (status === 429 || status === 503) return `The server is busy: ${withoutPeriod(message)}. Wait a moment, then ${again}.`;
  if (status < 500) return `The server rejected this: ${withoutPeriod(message)}. Change the text or the settings, then ${again}.`;
  return `The server failed: ${withoutPeriod(message)}. To try again, ${again}.`;
}
