// Conversations of a ChatGPT export: `conversations.json`, a list of trees.
import { type Fields, isFields } from "./foreign";

const SHOWN = new Set(["user", "assistant"]);

/** Return conversations in the form of this page, not yet validated; null if the value has another format. */
export function fromChatGpt(value: unknown): unknown[] | null {
  const all: unknown[] = Array.isArray(value) ? value : [value];
  const isConversation = (one: unknown): one is Fields => isFields(one) && isFields(one["mapping"]);
  return all.length && all.every(isConversation) ? all.map(convert) : null;
}

interface Node {
  id: string;
  parent: string | null;
  message: Fields | null;
}

function convert(conversation: Fields): unknown {
  const nodes = new Map<string, Node>();
  for (const [id, value] of Object.entries(conversation["mapping"] as Fields)) {
    if (!isFields(value)) continue;
    const parent = typeof value["parent"] === "string" ? value["parent"] : null;
    nodes.set(id, { id, parent, message: isFields(value["message"]) ? value["message"] : null });
  }

  /** Return the nodes from `id` up to the nearest one that is shown, which is the last; others are system and tool nodes. */
  function wayUp(id: unknown): Node[] {
    const way: Node[] = [];
    for (let node = nodes.get(String(id)); node && !way.includes(node); node = nodes.get(String(node.parent))) {
      way.push(node);
      if (isShown(node)) break;
    }
    return way;
  }
  const shownId = (id: unknown) => {
    const node = wayUp(id).at(-1);
    return node && isShown(node) ? node.id : null;
  };

  const instructions = [...nodes.values()].find(({ message }) => roleOf(message) === "system" && textOf(message));
  return {
    conversation: {
      title: conversation["title"] ?? "",
      created: milliseconds(conversation["create_time"]),
      updated: milliseconds(conversation["update_time"]),
      leaf: shownId(conversation["current_node"]),
      settings: { system: instructions ? textOf(instructions.message) : "" },
    },
    messages: [...nodes.values()].filter(isShown).map((node) => ({
      id: node.id,
      parent: shownId(node.parent),
      role: roleOf(node.message),
      content: textOf(node.message),
      reasoning: roleOf(node.message) === "assistant" ? wayUp(node.parent).map((one) => thoughtsOf(one.message)).filter(Boolean).reverse().join("\n\n") : "",
      created: milliseconds(node.message!["create_time"]),
      model: isFields(node.message!["metadata"]) ? node.message!["metadata"]["model_slug"] : undefined,
    })),
  };
}

function roleOf(message: Fields | null): unknown {
  return isFields(message?.["author"]) ? message["author"]["role"] : undefined;
}

function isShown({ message }: Node): boolean {
  const isHidden = isFields(message?.["metadata"]) && message["metadata"]["is_visually_hidden_from_conversation"] === true;
  // Calls of ChatGPT's own tools have another recipient than "all".
  const isForAll = (message?.["recipient"] ?? "all") === "all";
  return SHOWN.has(String(roleOf(message))) && !isHidden && isForAll && textOf(message) !== "";
}

/** Return the text of a message; pictures are not part of an export's JSON. */
function textOf(message: Fields | null): string {
  const content = isFields(message?.["content"]) ? message["content"] : {};
  const parts = Array.isArray(content["parts"]) ? content["parts"] : [];
  return parts
    .map((part: unknown) => (typeof part === "string" ? part : isFields(part) && typeof part["text"] === "string" ? part["text"] : ""))
    .filter(Boolean)
    .join("\n\n");
}

function thoughtsOf(message: Fields | null): string {
  const content = isFields(message?.["content"]) ? message["content"] : {};
  const thoughts = Array.isArray(content["thoughts"]) ? content["thoughts"].filter(isFields) : [];
  return thoughts.map((one) => String(one["content"] ?? "")).filter(Boolean).join("\n\n");
}

function milliseconds(seconds: unknown): number {
  return typeof seconds === "number" ? Math.round(1000 * seconds) : 0;
}
