// Error messages for the user, with what to do next.
import { type Catalogue, labels } from "../text";
import { ApiFailure } from "./http";

/** Return a message without its final period. */
function withoutPeriod(text: string): string {
  return text.trim().replace(/[.\s]+$/, "");
}

/** Return what failed and what the user can do. `action` is the one that retries. */
export function explain(error: unknown, action: keyof Catalogue["errors"]["again"]): string {
  const t = labels.value.errors;
  const again = t.again[action];
  if (!(error instanceof ApiFailure)) return error instanceof Error ? error.message : String(error);
  const { message, status, type } = error;
  if (status === 0) return t.checkRunning(message, again);
  if (status === 401) return t.keyMissing(again);
  if (type === "exceed_context_size_error") return t.contextExceeded(withoutPeriod(message));
  if (status === 413) return t.tooLarge(withoutPeriod(message));
  if (status === 503 && message.startsWith("Loading model")) return t.modelLoading(again);
  if (status === 503 && message.includes("is shutting down")) return t.shutDown(again);
  if (status === 429 || status === 503) return t.busy(withoutPeriod(message), again);
  if (status < 500) return t.rejected(withoutPeriod(message), again);
  return t.failed(withoutPeriod(message), again);
}
