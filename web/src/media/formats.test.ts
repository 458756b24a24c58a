import { expect, test } from "vitest";
import { claimedKind, mediaType, savedName } from "./formats";

function bytes(text: string): Uint8Array {
  return Uint8Array.from(text, (letter) => letter.charCodeAt(0));
}

test("finds the format by the first bytes", () => {
  const formats: [string, string | null][] = [
    ["\xff\xd8\xff\xe0", "image/jpeg"],
    ["\x89PNG\r\n\x1a\n", "image/png"],
    ["GIF89a", "image/gif"],
    ["RIFF\x10\0\0\0WEBPVP8 ", "image/webp"],
    ["RIFF\x10\0\0\0WAVEfmt ", "audio/wav"],
    ["RIFF\x10\0\0\0AVI LIST", null],
    ["BM\x10\0\0\0\0\0\0\0\x36", "image/bmp"],
    ["BM is a text", null],
    ["fLaC", "audio/flac"],
    ["OggS", "audio/ogg"],
    ["ID3\x04", "audio/mpeg"],
    ["\xff\xfb\x90\0", "audio/mpeg"],
    ["\xff\xf3\x90\0", "audio/mpeg"],
    ["\xff\xfeH\0e\0", null], // UTF-16 text
    ["\xff\xf8\x90\0", null],
    ["<svg xmlns='", null],
    ["\0\0\0\x18ftypheic", null],
    ["", null],
  ];
  for (const [head, type] of formats) expect([head, mediaType(bytes(head))]).toEqual([head, type]);
});

test("names the kind that a file claims to have, except text", () => {
  const files: [name: string, type: string, kind: string | null][] = [
    ["a.HEIC", "", "image"],
    ["a.avif", "image/avif", "image"],
    ["a.m4a", "audio/mp4", "audio"],
    ["a.svg", "image/svg+xml", null],
    ["a.txt", "text/plain", null],
    ["imagery", "", null],
  ];
  for (const [name, type, kind] of files) expect([name, claimedKind({ name, type })]).toEqual([name, kind]);
});

test("saves a file with the extension of its content", () => {
  expect(savedName("photo.exe", "image/png")).toBe("photo.png");
  expect(savedName("../etc/x\u202egnp.html", "image/gif")).toBe("_etc_x_gnp.gif");
  expect(savedName("übung 1.wav", "audio/wav")).toBe("übung 1.wav");
  expect(savedName(".png", "image/png")).toBe("file.png");
});
