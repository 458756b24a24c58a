// Number of tokens of a draft, counted by the server while it is idle.
import { useEffect, useState } from "preact/hooks";
import { postJson } from "../api/http";
import { isModelLoaded } from "../api/server";
import { draftAttachments, draftChanges, draftText } from "./drafts";
import { fileText } from "./generate";
import { isAnyBusy } from "./tasks";
import { isMedia, isText } from "./tree";

const PAUSE_MS = 500;

async function countTokens(model: string, content: string, stopped: AbortSignal): Promise<number> {
  const body = { content, ...(model ? { model } : {}) };
  return (await postJson<{ tokens: unknown[] }>("tokenize", body, stopped)).tokens.length;
}

/** Return the number of tokens of the draft, with its attachments; 0 if there is none or it is unknown. */
export function useDraftTokens(place: string, model: string): number {
  const [tokens, setTokens] = useState(0);
  const files = draftAttachments(place);
  const isQuiet = !isAnyBusy.value && isModelLoaded(model);
  const changes = draftChanges.value;
  useEffect(() => {
    const text = [...files.filter(isText).map(fileText), draftText(place)].filter(Boolean).join("\n\n");
    const media = files.filter(isMedia).reduce((sum, one) => sum + (one.tokens ?? 0), 0);
    if (!text) setTokens(media);
    if (!text || !isQuiet) return;
    const stopped = new AbortController();
    const timer = setTimeout(() => {
      // A failure is no news: the request itself will report it.
      countTokens(model, text, stopped.signal).then((found) => setTokens(media + found), () => undefined);
    }, PAUSE_MS);
    return () => {
      clearTimeout(timer);
      stopped.abort();
    };
  }, [place, model, isQuiet, files, changes]);
  return tokens;
}
