import { expect, test } from "vitest";
import { EventParser } from "./sse";

const TEXT = 'data: {"a": "ä😀"}\r\n\r\n: a comment\n\nevent: end\ndata: one\ndata:two\n\ndata: not ended';
const bytes = (text: string) => new TextEncoder().encode(text).length;

test("parses the same events for every split of the text", () => {
  const whole = new EventParser().push(TEXT);
  expect(whole).toEqual([
    { event: "message", data: '{"a": "ä😀"}', end: bytes('data: {"a": "ä😀"}\r\n\r\n') },
    { event: "end", data: "one\ntwo", end: bytes(TEXT) - bytes("data: not ended") },
  ]);
  for (let cut = 0; cut <= TEXT.length; cut++) {
    const parser = new EventParser();
    expect([...parser.push(TEXT.slice(0, cut)), ...parser.push(TEXT.slice(cut))]).toEqual(whole);
  }
});
