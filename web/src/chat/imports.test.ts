import { expect, test } from "vitest";
import { fromChatGpt } from "./chatgpt";
import { fromOpenWebUi } from "./openwebui";
import { message } from "./validate";

function node(id: string, parent: string | null, role: string, content: object, more: object = {}) {
  return [id, { id, parent, children: [], message: { id, author: { role }, create_time: 2.5, content, recipient: "all", ...more } }] as const;
}
const words = (...parts: unknown[]) => ({ content_type: "text", parts });

test("a ChatGPT export becomes trees without system and tool nodes", () => {
  const mapping = Object.fromEntries([
    ["root", { id: "root", parent: null, children: ["s"], message: null }],
    node("s", "root", "system", words("")),
    node("i", "s", "system", words("Be brief.")),
    node("q", "i", "user", { content_type: "multimodal_text", parts: ["Look", { content_type: "image_asset_pointer" }] }),
    node("t", "q", "assistant", { content_type: "thoughts", thoughts: [{ summary: "x", content: "hm" }] }),
    node("c", "t", "assistant", words("search()"), { recipient: "browser" }),
    node("r", "c", "tool", words("result")),
    node("a", "r", "assistant", words("A river."), { metadata: { model_slug: "gpt-4o" } }),
    node("b", "q", "assistant", words("Another.")),
    node("h", "a", "user", words("hidden"), { metadata: { is_visually_hidden_from_conversation: true } }),
  ]);
  const found = fromChatGpt([{ title: "Rivers", create_time: 1, update_time: 2, mapping, current_node: "h" }]);
  expect(found).toMatchObject([
    {
      conversation: { title: "Rivers", created: 1000, updated: 2000, leaf: "a", settings: { system: "Be brief." } },
      messages: [
        { id: "q", parent: null, role: "user", content: "Look", created: 2500 },
        { id: "a", parent: "q", role: "assistant", content: "A river.", reasoning: "hm", model: "gpt-4o" },
        { id: "b", parent: "q", content: "Another." },
      ],
    },
  ]);
  const loop = { a: node("a", "b", "system", words("x"))[1], b: node("b", "a", "system", words("x"))[1] };
  expect(fromChatGpt([{ mapping: loop, current_node: "a" }])).toMatchObject([{ conversation: { leaf: null }, messages: [] }]);
  for (const other of [[], null, 3, [{ title: "x" }]]) expect(fromChatGpt(other)).toBe(null);
});

test("an Open WebUI export becomes trees", () => {
  const thought = '<details type="reasoning" done="true" duration="2">\n<summary>Thought for 2 seconds</summary>\n&gt; Is 1 &lt; 2?\n&gt; Yes.\n</details>\nA river.';
  const messages = {
    q: { id: "q", parentId: null, childrenIds: ["a"], role: "user", content: "Look", timestamp: 3, files: [
      { type: "image", url: "data:image/png;base64,AA==" },
      { type: "file", name: "a.txt", file: { data: { content: "text" } } },
      { type: "image", url: "https://example.org/a.png" },
    ] },
    a: { id: "a", parentId: "q", childrenIds: [], role: "assistant", content: thought, model: "llama3:8b", timestamp: 4 },
  };
  const chat = { title: "Rivers", params: { system: "Be brief." }, history: { messages, currentId: "a" } };
  expect(fromOpenWebUi([{ id: "1", title: "Rivers", chat, created_at: 1, updated_at: 2, pinned: true }])).toMatchObject([
    {
      conversation: { title: "Rivers", created: 1000, updated: 2000, leaf: "a", isPinned: true, settings: { system: "Be brief." } },
      messages: [
        { id: "q", parent: null, content: "Look", created: 3000, attachments: [{ data: "data:image/png;base64,AA==" }, { name: "a.txt", text: "text" }] },
        { id: "a", parent: "q", content: "A river.", reasoning: "Is 1 < 2?\nYes.", model: "llama3:8b" },
      ],
    },
  ]);
  for (const other of [[], null, 3, [{ chat: {} }]]) expect(fromOpenWebUi(other)).toBe(null);
});

test("an answer keeps the place in its stream", () => {
  const answer = { id: "a", role: "assistant", content: "A", ending: "interrupted", stream: "s", streamOffset: 7 };
  expect(message(answer)).toMatchObject({ stream: "s", streamOffset: 7 });
  expect(message({ ...answer, stream: 1, streamOffset: "7" })).not.toHaveProperty("stream");
  expect(message({ ...answer, stream: 1, streamOffset: "7" })).not.toHaveProperty("streamOffset");
});
