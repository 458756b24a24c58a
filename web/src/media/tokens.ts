// Tokens that pictures and sounds take in a prompt, counted by the server.
import { postJson } from "../api/http";
import { mediaPart } from "../chat/generate";
import type { MediaFile } from "../chat/tree";

const TEXT = { type: "text", text: "." };

async function count(model: string, content: readonly unknown[]): Promise<number> {
  const body = { ...(model ? { model } : {}), messages: [{ role: "user", content }] };
  return (await postJson<{ input_tokens: number }>("v1/chat/completions/input_tokens", body)).input_tokens;
}

/** Return the number of tokens that a file adds to a prompt; undefined if the server cannot count them. */
export async function countTokens(file: MediaFile, model: string): Promise<number | undefined> {
  try {
    const [whole, rest] = await Promise.all([count(model, [await mediaPart(file), TEXT]), count(model, [TEXT])]);
    return whole > rest ? whole - rest : undefined;
  } catch {
    return undefined; // it is only shown; the request itself will report the problem
  }
}
