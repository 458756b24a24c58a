// WAV files: 16-bit PCM, one channel.

const HEADER_BYTES = 44;

/** Return the mean of the channels. */
export function mixToMono(channels: readonly Float32Array[]): Float32Array {
  const [first = new Float32Array(), ...others] = channels;
  if (!others.length) return first;
  return first.map((value, i) => others.reduce((sum, one) => sum + one[i]!, value) / channels.length);
}

/** Return samples between -1 and 1 as a WAV file. */
export function encodeWav(samples: Float32Array, rate: number): Blob {
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + 2 * samples.length));
  const write = (at: number, text: string) => [...text].forEach((letter, i) => view.setUint8(at + i, letter.charCodeAt(0)));
  write(0, "RIFF");
  view.setUint32(4, view.byteLength - 8, true);
  write(8, "WAVEfmt ");
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, rate, true);
  view.setUint32(28, 2 * rate, true); // bytes per second
  view.setUint16(32, 2, true); // bytes per sample
  view.setUint16(34, 16, true); // bits per sample
  write(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, i) => {
    view.setInt16(HEADER_BYTES + 2 * i, Math.max(-32768, Math.min(32767, Math.round(32767 * value))), true);
  });
  return new Blob([view], { type: "audio/wav" });
}
