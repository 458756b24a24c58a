// Conversations that Open WebUI exports: a list of chats, each with its history as a tree.
import { type Fields, isFields } from "./foreign";

/** Return conversations in the form of this page, not yet validated; null if the value has another format. */
export function fromOpenWebUi(value: unknown): unknown[] | null {
  const all: unknown[] = Array.isArray(value) ? value : [value];
  return all.length && all.every(isChat) ? all.map(convert) : null;
}

type Chat = Fields & { chat: Fields & { history: Fields & { messages: Fields } } };

function isChat(one: unknown): one is Chat {
  return isFields(one) && isFields(one["chat"]) && isFields(one["chat"]["history"]) && isFields(one["chat"]["history"]["messages"]);
}

const REASONING = /^\s*<details type="reasoning"[^>]*>\s*(?:<summary>.*?<\/summary>)?(.*?)<\/details>\s*/s;

function convert({ chat, ...entry }: Chat): unknown {
  const messages = Object.values(chat.history.messages).filter(isFields);
  const ids = new Set(messages.filter(isShown).map((one) => one["id"]));
  const parentOf = (id: unknown) => (ids.has(id) ? id : null);
  const params = isFields(chat["params"]) ? chat["params"] : {};
  return {
    conversation: {
      title: entry["title"] ?? chat["title"],
      created: milliseconds(entry["created_at"] ?? chat["timestamp"]),
      updated: milliseconds(entry["updated_at"] ?? chat["timestamp"]),
      leaf: parentOf(chat.history["currentId"]),
      isPinned: entry["pinned"],
      settings: { system: params["system"] ?? chat["system"] },
    },
    messages: messages.filter(isShown).map((one) => {
      const content = String(one["content"] ?? "");
      const isAnswer = one["role"] === "assistant";
      const thought = isAnswer ? REASONING.exec(content) : null;
      return {
        id: one["id"],
        parent: parentOf(one["parentId"]),
        role: one["role"],
        content: thought ? content.slice(thought[0].length) : content,
        reasoning: thought ? unquote(thought[1]!) : undefined,
        created: milliseconds(one["timestamp"]),
        model: one["modelName"] ?? one["model"],
        attachments: Array.isArray(one["files"]) ? one["files"].filter(isFields).flatMap(convertFile) : undefined,
      };
    }),
  };
}

function isShown(message: Fields): boolean {
  return typeof message["id"] === "string" && (message["role"] === "user" || message["role"] === "assistant");
}

/** Reasoning is stored as a quotation, with escaped characters. */
function unquote(text: string): string {
  const plain = text.replaceAll("&gt;", ">").replaceAll("&lt;", "<").replaceAll("&quot;", '"').replaceAll("&#x27;", "'").replaceAll("&amp;", "&");
  return plain.replace(/^> ?/gm, "").trim();
}

/** Pictures are in the file if they are `data:` URIs; texts, if the server had read them. */
function convertFile(file: Fields): unknown[] {
  const name = typeof file["name"] === "string" ? file["name"] : "picture";
  if (typeof file["url"] === "string" && file["url"].startsWith("data:")) return [{ name, data: file["url"] }];
  const data = isFields(file["file"]) && isFields(file["file"]["data"]) ? file["file"]["data"] : {};
  return typeof data["content"] === "string" ? [{ name, text: data["content"] }] : [];
}

/** Times are seconds, in some versions milliseconds or nanoseconds. */
function milliseconds(time: unknown): number {
  if (typeof time !== "number") return 0;
  return Math.round(time > 1e17 ? time / 1e6 : time > 1e11 ? time : 1000 * time);
}
