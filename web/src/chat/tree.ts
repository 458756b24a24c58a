// A conversation is a tree: an edit or another answer starts a branch. The page shows the path from the root to
// one leaf.
import type { Settings } from "./settings";

export interface Conversation {
  id: string;
  title: string;
  created: number;
  updated: number;
  /** End of the current branch. */
  leaf: string | null;
  settings: Settings;
  /** True if it stays at the top of the list. */
  isPinned?: boolean;
  /** Name of its folder; "" or absent: it is in none. */
  folder?: string;
}

export interface ToolCall {
  id: string;
  name: string;
  /** JSON, as the model wrote it. */
  arguments: string;
}

/** An attached file as text. */
export interface TextFile {
  name: string;
  text: string;
}

/** An attached picture or sound. */
export interface MediaFile {
  name: string;
  /** Its type is one of `MEDIA_TYPES`. */
  blob: Blob;
  /** Tokens that it takes in a prompt, if the server returned their number. */
  tokens?: number;
}

export type Attachment = TextFile | MediaFile;

export function isText(one: Attachment): one is TextFile {
  return !isMedia(one);
}

export function isMedia(one: Attachment): one is MediaFile {
  return "blob" in one;
}

/** Statistics of one answer; milliseconds. */
export interface Stats {
  promptTokens: number;
  cachedTokens: number;
  tokens: number;
  tokensPerSecond: number;
  firstTokenMs: number;
  drafted?: number;
  accepted?: number;
}

export interface TokenProbs {
  token: string;
  /** Natural logarithm. */
  logprob: number;
  top: { token: string; logprob: number }[];
}

/** `interrupted`: the page or the stream ended before the answer did. */
export type Ending = "stop" | "length" | "tool_calls" | "aborted" | "interrupted" | "error";


export interface Message {
  id: string;
  conversation: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  reasoning?: string;
  thoughtMs?: number;
  toolCalls?: ToolCall[];
  /** The call that a tool's message answers. */
  toolCallId?: string;
  attachments?: Attachment[];
  created: number;
  model?: string;
  /** Common to the answers that were requested together. */
  group?: string;
  stats?: Stats;
  probs?: TokenProbs[];
  ending?: Ending;
  error?: string;
  /** The server's stream of a message that is not complete, and the bytes of it that the message holds. */
  stream?: string;
  streamOffset?: number;
}

export type Messages = ReadonlyMap<string, Message>;

/** Return the messages from the root to `leaf`. */
export function path(messages: Messages, leaf: string | null): Message[] {
  const found: Message[] = [];
  for (let id = leaf; id !== null; ) {
    const message = messages.get(id);
    if (!message) break;
    found.push(message);
    id = message.parent;
  }
  return found.reverse();
}

/** Messages by their parents, oldest first. */
export type Children = ReadonlyMap<string | null, readonly Message[]>;

export function childrenByParent(messages: Messages): Children {
  const found = new Map<string | null, Message[]>();
  for (const one of messages.values()) {
    const siblings = found.get(one.parent);
    if (siblings) siblings.push(one);
    else found.set(one.parent, [one]);
  }
  for (const siblings of found.values()) siblings.sort((a, b) => a.created - b.created);
  return found;
}

/** Return the versions of a message, oldest first: all messages with the same parent. */
export function versions(children: Children, message: Message): readonly Message[] {
  return children.get(message.parent) ?? [message];
}

/** Return the newest leaf below a message. */
export function newestLeaf(children: Children, id: string): string {
  for (let at = id; ; ) {
    const next = children.get(at)?.at(-1);
    if (!next) return at;
    at = next.id;
  }
}

/** Return the ids of a message and of everything below it. */
export function subtree(children: Children, id: string): string[] {
  return [id, ...(children.get(id) ?? []).flatMap((child) => subtree(children, child.id))];
}
