// Conversion of sounds in the browser.
import { encodeWav, mixToMono } from "./wav";

/** Samples per second of recordings, the rate of speech encoders. */
export const RATE = 16_000;

/** Return a sound in any format of the browser as WAV with one channel. Throws an Error if the browser cannot decode it. */
export async function toWav(bytes: ArrayBuffer): Promise<Blob> {
  // Decoding also converts to the rate of the context.
  const found = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes);
  const channels = Array.from({ length: found.numberOfChannels }, (_, i) => found.getChannelData(i));
  return encodeWav(mixToMono(channels), RATE);
}
