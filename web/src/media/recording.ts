// Recording with the microphone.
import { labels } from "../text";
import { MAX_MEDIA_BYTES } from "./read";
import { RATE, toWav } from "./sound";

/** Longest recording, in seconds: as WAV it is not larger than other sounds may be. */
export const MAX_SECONDS = Math.floor((MAX_MEDIA_BYTES - 100) / (2 * RATE));
const CHUNK_MS = 1000;

export interface Recording {
  /** End the recording and return it as WAV, 16-bit, 16 kHz, one channel. */
  finish: () => Promise<Blob>;
  /** End the recording and discard it. */
  cancel: () => void;
}

/** Start to record. Throws an Error that says why the browser does not record and what to do. */
export async function startRecording(): Promise<Recording> {
  // Browsers offer neither on a page from another machine without HTTPS.
  if (!navigator.mediaDevices || typeof MediaRecorder === "undefined") {
    throw new Error(labels.value.media.needsHttps);
  }
  let stream: MediaStream;
  try {
    stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1 } });
  } catch (error) {
    throw new Error(explain(error));
  }
  const recorder = new MediaRecorder(stream, { audioBitsPerSecond: 128_000 });
  const chunks: Blob[] = [];
  recorder.ondataavailable = (event) => chunks.push(event.data);
  const ended = new Promise<void>((resolve) => (recorder.onstop = () => resolve()));
  recorder.start(CHUNK_MS);

  function end(): void {
    if (recorder.state !== "inactive") recorder.stop();
    for (const track of stream.getTracks()) track.stop(); // also turns off the browser's sign of a recording
  }
  return {
    async finish() {
      end();
      await ended;
      return toWav(await new Blob(chunks).arrayBuffer());
    },
    cancel: end,
  };
}

function explain(error: unknown): string {
  const name = error instanceof DOMException ? error.name : "";
  const t = labels.value.media;
  if (name === "NotAllowedError") return t.notAllowed;
  if (name === "NotFoundError") return t.noMicrophone;
  if (name === "NotReadableError") return t.microphoneInUse;
  return t.microphoneFailed(error instanceof Error ? error.message : String(error));
}
