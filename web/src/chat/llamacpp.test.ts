import { expect, test } from "vitest";
import { fromLlamaCpp } from "./llamacpp";

const CONV = { id: "c", name: "Rivers", lastModified: 5, currNode: "a" };
const CALL = { id: "1", type: "function", function: { name: "f", arguments: "{}" } };
const MESSAGES = [
  { id: "r", parent: null, role: "system", type: "root", content: "" },
  { id: "s", parent: "r", role: "system", type: "system", content: "Be brief." },
  { id: "q", parent: "s", role: "user", content: "Look", timestamp: 3, extra: [
    { type: "IMAGE", name: "p.png", base64Url: "data:image/png;base64,AA==" },
    { type: "AUDIO", name: "s.mp3", mimeType: "audio/mpeg", base64Data: "BB==" },
    { type: "VIDEO", name: "v.mp4", mimeType: "video/mp4", base64Data: "CC==" },
    { type: "PDF", name: "d.pdf", content: "text" },
    null,
  ] },
  { id: "a", parent: "q", role: "assistant", content: "Yes", reasoningContent: "hm", toolCalls: JSON.stringify([CALL]) },
];
const EXPECTED = {
  conversation: { title: "Rivers", updated: 5, leaf: "a", settings: { system: "Be brief." } },
  messages: [
    { id: "q", parent: null, role: "user", created: 3, attachments: [
      { name: "p.png", data: "data:image/png;base64,AA==" },
      { name: "s.mp3", data: "data:audio/mpeg;base64,BB==" },
      { name: "d.pdf", text: "text" },
    ] },
    { id: "a", parent: "q", reasoning: "hm", toolCalls: [{ id: "1", name: "f", arguments: "{}" }] },
  ],
};

function lines(...records: unknown[]): string {
  return records.map((one) => JSON.stringify(one)).join("\n");
}

test("reads JSON lines and both older forms", () => {
  const session = { type: "session", harness: "llama.cpp", ...CONV };
  const records = MESSAGES.map((message) => ({ type: "message", message }));
  const withCalls = { type: "message", message: { ...MESSAGES[3], toolCalls: [CALL] } };
  const files = [
    lines(session, ...records),
    lines(session, ...records.slice(0, 3), withCalls, { type: "other" }),
    JSON.stringify({ conv: CONV, messages: MESSAGES }, null, 1),
    JSON.stringify([{ conv: CONV, messages: MESSAGES }]),
  ];
  for (const file of files) expect(fromLlamaCpp(file)).toMatchObject([EXPECTED]);
  expect(fromLlamaCpp(lines(session, ...records, session))).toHaveLength(2);
});

test("leaves other files alone, and survives damaged ones", () => {
  for (const file of ['{"format": "llamado-conversations"}', "[]", "3", "[3]", '{"conv": 1, "messages": []}']) {
    expect([file, fromLlamaCpp(file)]).toEqual([file, null]);
  }
  expect(() => fromLlamaCpp("no JSON")).toThrow(SyntaxError);
  const loop = { id: "s", parent: "s", role: "system", content: "x" };
  const [found] = fromLlamaCpp(JSON.stringify({ conv: { currNode: "s" }, messages: [loop, { id: "q", parent: "s", role: "user" }] }))!;
  expect(found).toMatchObject({ conversation: { leaf: null }, messages: [{ id: "q", parent: null }] });
});
