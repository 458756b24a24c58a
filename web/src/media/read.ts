// Pictures and sounds that the user attaches.
import type { Modalities } from "../api/server";
import type { MediaFile } from "../chat/tree";
import { labels } from "../text";
import { claimedKind, HEAD_BYTES, kindOf, mediaType } from "./formats";
import { fitPicture } from "./picture";
import { toWav } from "./sound";

/** Largest picture or sound that is sent as it is: a request holds all of a chat, and the server accepts 32 MiB. */
export const MAX_MEDIA_BYTES = 8_000_000;
/** Largest file that is read at all, before it is scaled down or converted. */
const MAX_FILE_BYTES = 200_000_000;

/**
 * Read a picture or sound; large ones are scaled down or converted. Returns null for other files. Throws an Error that
 * names the problem if the model or the server does not accept it.
 */
export async function readMedia(file: File, accepts: Modalities): Promise<MediaFile | null> {
  const type = mediaType(new Uint8Array(await file.slice(0, HEAD_BYTES).arrayBuffer()));
  const kind = type ? kindOf(type) : claimedKind(file);
  if (!kind) return null;
  if (!accepts[kind]) throw new Error(labels.value.media.notAccepted[kind]);
  if (!type) throw new Error(labels.value.media.unknownFormat[kind]);
  if (file.size > MAX_FILE_BYTES) throw new Error(labels.value.chat.largerThan(MAX_FILE_BYTES / 1e6));
  // A copy: the file on the disk may change or vanish.
  const blob = new Blob([await file.arrayBuffer()], { type });
  return { name: file.name, blob: kind === "image" ? await fitPicture(blob, MAX_MEDIA_BYTES) : await fitSound(blob) };
}

async function fitSound(blob: Blob): Promise<Blob> {
  if (blob.size <= MAX_MEDIA_BYTES) return blob;
  const converted = await toWav(await blob.arrayBuffer()).catch(() => null);
  if (!converted || converted.size > MAX_MEDIA_BYTES) throw new Error(labels.value.media.soundLargerThan(MAX_MEDIA_BYTES / 1e6));
  return converted;
}
