// Errors in plain words, with what to do about them.
import { ApiFailure } from "./http";

/** The server's words as a sentence without its end. */
function quoted(words: string): string {
  return words.trim().replace(/[.\s]+$/, "");
}

/** What went wrong and what the reader can do. `again` says how to repeat what failed, such as "choose Regenerate". */
export function explain(error: unknown, again: string): string {
  if (!(error instanceof ApiFailure)) return error instanceof Error ? error.message : String(error);
  const { message, status, type } = error;
  if (status === 0) return `${message} Check that it is running, then ${again}.`;
  if (status === 401) return `The server needs an API key. Enter it, then ${again}.`;
  if (type === "exceed_context_size_error") {
    return `This is longer than the model's context: ${quoted(message)}. Shorten it, start a new chat, or restart the server with a larger --ctx-size.`;
  }
  if (status === 503 && message.startsWith("Loading model")) return `The model is still loading. Wait until it is ready, then ${again}.`;
  if (status === 429 || status === 503) return `The server has no room for this now: ${quoted(message)}. Wait a moment, then ${again}.`;
  if (status < 500) return `The server refused this: ${quoted(message)}. Change the text or the settings, then ${again}.`;
  return `The server failed: ${quoted(message)}. To try again, ${again}.`;
}
