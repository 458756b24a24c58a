// Conversations that the page of llama.cpp's server exports: JSON lines, in older versions one JSON value.
import { type Fields, isFields } from "./foreign";

interface Session {
  conv: Fields;
  messages: Fields[];
}

/** Return conversations in the form of this page, not yet validated; null if the file has another format. */
export function fromLlamaCpp(text: string): unknown[] | null {
  const sessions = parseLines(text) ?? parseWhole(text);
  return sessions && sessions.map(convert);
}

function parseLines(text: string): Session[] | null {
  const lines = text.split("\n").filter((line) => line.trim());
  let first: unknown;
  try {
    first = JSON.parse(lines[0] ?? "");
  } catch {
    return null; // JSON over several lines
  }
  if (!isFields(first) || first["type"] !== "session") return null;
  const found: Session[] = [];
  for (const line of lines) {
    const record: unknown = JSON.parse(line);
    if (!isFields(record)) continue;
    if (record["type"] === "session") found.push({ conv: record, messages: [] });
    else if (record["type"] === "message" && isFields(record["message"])) found.at(-1)!.messages.push(record["message"]);
  }
  return found;
}

function parseWhole(text: string): Session[] | null {
  const value: unknown = JSON.parse(text);
  const all: unknown[] = Array.isArray(value) ? value : [value];
  const isSession = (one: unknown): one is Session =>
    isFields(one) && isFields(one["conv"]) && Array.isArray(one["messages"]) && one["messages"].every(isFields);
  return all.length && all.every(isSession) ? all : null;
}

/** The roots of trees and the system prompts are messages there; here they are not. */
function isShown(message: Fields): boolean {
  return message["type"] !== "root" && message["role"] !== "system";
}

function convert({ conv, messages }: Session): unknown {
  const byId = new Map(messages.map((one) => [one["id"], one]));
  /** Return the id of the nearest message that is shown, from `id` up. */
  function shownId(id: unknown): unknown {
    const passed = new Set<unknown>();
    while (byId.has(id) && !isShown(byId.get(id)!) && !passed.has(id)) {
      passed.add(id);
      id = byId.get(id)!["parent"];
    }
    const found = byId.get(id);
    return found && isShown(found) ? id : null;
  }
  const system = messages.find((one) => one["role"] === "system" && one["type"] !== "root")?.["content"];
  return {
    conversation: {
      title: conv["name"],
      created: conv["lastModified"],
      updated: conv["lastModified"],
      leaf: shownId(conv["currNode"]),
      settings: { system },
    },
    messages: messages.filter(isShown).map((one) => ({
      id: one["id"],
      parent: shownId(one["parent"]),
      role: one["role"],
      content: one["content"],
      reasoning: one["reasoningContent"] ?? one["thinking"],
      toolCalls: convertCalls(one["toolCalls"]),
      toolCallId: one["toolCallId"],
      created: one["timestamp"],
      model: one["model"],
      attachments: Array.isArray(one["extra"]) ? one["extra"].filter(isFields).flatMap(convertExtra) : undefined,
    })),
  };
}

/** Tool calls are in OpenAI's form, as an array or as JSON text. */
function convertCalls(value: unknown): unknown {
  let calls = value;
  if (typeof value === "string") {
    try {
      calls = JSON.parse(value);
    } catch {
      return undefined;
    }
  }
  if (!Array.isArray(calls) || !calls.length) return undefined;
  return calls.filter(isFields).map((one) => ({ id: one["id"], ...(isFields(one["function"]) ? one["function"] : {}) }));
}

function convertExtra(extra: Fields): unknown[] {
  const { type, name } = extra;
  if (type === "IMAGE") return [{ name, data: extra["base64Url"] }];
  if (type === "AUDIO") return [{ name, data: `data:${String(extra["mimeType"])};base64,${String(extra["base64Data"])}` }];
  return typeof extra["content"] === "string" ? [{ name, text: extra["content"] }] : [];
}
