// Pictures and sounds as `data:` URIs (RFC 2397), the form that requests and exported chats contain.
import { labels } from "../text";
import { HEAD_BYTES, mediaType } from "./formats";

const DATA_URI = /^data:(image|audio)\/[a-z0-9.+-]{1,40};base64,/i;

/** Return the bytes of a blob in base64. */
export async function toBase64(blob: Blob): Promise<string> {
  const uri = await toDataUri(blob);
  return uri.slice(uri.indexOf(",") + 1);
}

export function toDataUri(blob: Blob): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error(labels.value.media.gone));
    reader.readAsDataURL(blob);
  });
}

/** Return the picture or sound in a URI, with the type of its content; null for everything else. */
export function fromDataUri(uri: unknown): Blob | null {
  if (typeof uri !== "string") return null;
  const head = DATA_URI.exec(uri)?.[0];
  if (!head) return null;
  let text: string;
  try {
    text = atob(uri.slice(head.length));
  } catch {
    return null;
  }
  const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
  const type = mediaType(bytes.subarray(0, HEAD_BYTES));
  return type && new Blob([bytes], { type });
}
