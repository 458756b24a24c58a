// Number of tokens of a draft, counted by the server while it is idle.
import { useEffect, useState } from "preact/hooks";
import { postJson } from "../api/http";
import { isModelLoaded } from "../api/server";
import { draftAttachments, draftChanges, draftText } from "./drafts";
import { fileText } from "./generate";
import { isAnyBusy } from "./tasks";
import { type Attachment, isMedia, type TextFile } from "./tree";

const PAUSE_MS = 500;

/** Tokens of attached files, by model. */
const counted = new WeakMap<TextFile, Map<string, number>>();

async function countText(model: string, content: string, stopped: AbortSignal): Promise<number> {
  if (!content) return 0;
  const body = { content, ...(model ? { model } : {}) };
  return (await postJson<{ tokens: unknown[] }>("tokenize", body, stopped)).tokens.length;
}

async function countFile(model: string, file: Attachment, stopped: AbortSignal): Promise<number> {
  if (isMedia(file)) return file.tokens ?? 0;
  const known = counted.get(file) ?? new Map<string, number>();
  counted.set(file, known);
  const tokens = known.get(model) ?? (await countText(model, fileText(file), stopped));
  known.set(model, tokens);
  return tokens;
}

/** Return the number of tokens of the draft, with its attachments; 0 if there is none or it is unknown. */
export function useDraftTokens(place: string, model: string): number {
  const [tokens, setTokens] = useState(0);
  const files = draftAttachments(place);
  const isQuiet = !isAnyBusy.value && isModelLoaded(model);
  const changes = draftChanges.value;
  useEffect(() => {
    const text = draftText(place);
    if (!text && !files.length) setTokens(0);
    else if (isQuiet) {
      const stopped = new AbortController();
      const timer = setTimeout(() => {
        const counts = [countText(model, text, stopped.signal), ...files.map((one) => countFile(model, one, stopped.signal))];
        // A failure is no news: the request itself will report it.
        Promise.all(counts).then((all) => setTokens(all.reduce((sum, one) => sum + one, 0)), () => undefined);
      }, PAUSE_MS);
      return () => {
        clearTimeout(timer);
        stopped.abort();
      };
    }
    return undefined;
  }, [place, model, isQuiet, files, changes]);
  return tokens;
}
