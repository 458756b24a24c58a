// Kinds of files that can be part of a message, by their first bytes.

export type MediaKind = "image" | "audio";

/** Formats that the server decodes. Others, such as SVG, which can run scripts, are never shown. */
export const MEDIA_TYPES = {
  image: ["image/jpeg", "image/png", "image/gif", "image/webp", "image/bmp"],
  audio: ["audio/wav", "audio/mpeg", "audio/flac", "audio/ogg"],
} as const satisfies Record<MediaKind, readonly string[]>;

export type MediaType = (typeof MEDIA_TYPES)[MediaKind][number];

/** Number of bytes that `mediaType` reads. */
export const HEAD_BYTES = 16;

/** Return the format of a picture or sound; null if it is none that the server decodes. */
export function mediaType(head: Uint8Array): MediaType | null {
  const starts = (text: string, at = 0) => [...text].every((letter, i) => head[at + i] === letter.charCodeAt(0));
  if (starts("\xff\xd8\xff")) return "image/jpeg";
  if (starts("\x89PNG\r\n\x1a\n")) return "image/png";
  if (starts("GIF8")) return "image/gif";
  // Bytes 6 to 9 are reserved and zero, unlike in a text that begins with BM.
  if (starts("BM") && starts("\0\0\0\0", 6)) return "image/bmp";
  if (starts("RIFF") && starts("WEBP", 8)) return "image/webp";
  if (starts("RIFF") && starts("WAVE", 8)) return "audio/wav";
  if (starts("fLaC")) return "audio/flac";
  if (starts("OggS")) return "audio/ogg";
  if (starts("ID3")) return "audio/mpeg";
  // MPEG audio without a tag: eleven set bits, a version that exists, and layer 2 or 3. Layer 1 would also fit UTF-16 text.
  const [first = 0, second = 0] = head;
  const layer = 4 - ((second >> 1) & 3);
  const isMpeg = first === 0xff && (second & 0xe0) === 0xe0 && (second & 0x18) !== 8 && (layer === 2 || layer === 3);
  return isMpeg ? "audio/mpeg" : null;
}

export function kindOf(type: string): MediaKind | null {
  const found = (["image", "audio"] as const).find((kind) => type.startsWith(`${kind}/`));
  return found ?? null;
}

/** Return the kind that a file claims to have, by its type or the end of its name; null for other files. */
export function claimedKind(file: { type: string; name: string }): MediaKind | null {
  if (/\.(heic|heif|avif|tiff?)$/i.test(file.name)) return "image";
  return file.type === "image/svg+xml" ? null : kindOf(file.type);
}

const EXTENSIONS: Record<MediaType, string> = {
  "image/jpeg": "jpg",
  "image/png": "png",
  "image/gif": "gif",
  "image/webp": "webp",
  "image/bmp": "bmp",
  "audio/wav": "wav",
  "audio/mpeg": "mp3",
  "audio/flac": "flac",
  "audio/ogg": "ogg",
};

/** Return the name for a saved copy. Its extension is that of the content: the name may come from an imported chat. */
export function savedName(name: string, type: string): string {
  const stem = name.replace(/\.[^.]*$/, "").replace(/[^\p{L}\p{N} _-]+/gu, "_");
  return `${stem || "file"}.${EXTENSIONS[type as MediaType] ?? "bin"}`;
}
