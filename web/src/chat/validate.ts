// Validation of imported conversations: only fields that the page itself writes are kept.
import { NO_SETTINGS, type Settings } from "./settings";
import { fromDataUri } from "../media/dataUri";
import { labels } from "../text";
import type { Attachment, Conversation, Message, Stats, TokenProbs, ToolCall } from "./tree";

type Fields = Record<string, unknown>;

function fields(value: unknown): Fields {
  return typeof value === "object" && value !== null ? (value as Fields) : {};
}

function list<T>(value: unknown, one: (found: Fields) => T): T[] {
  return Array.isArray(value) ? value.map((each) => one(fields(each))) : [];
}

const text = (value: unknown): string => (typeof value === "string" ? value : "");
const number = (value: unknown): number => (typeof value === "number" ? value : 0);

const call = (one: Fields): ToolCall => ({ id: text(one["id"]), name: text(one["name"]), arguments: text(one["arguments"]) });

/** Return a text, picture or sound; nothing if it should be a picture or sound but is none that the page shows. */
function attachment(one: Fields): Attachment[] {
  const name = text(one["name"]);
  if (one["data"] === undefined) return [{ name, text: text(one["text"]) }];
  const blob = fromDataUri(one["data"]);
  const tokens = number(one["tokens"]);
  return blob ? [{ name, blob, ...(tokens ? { tokens } : {}) }] : [];
}

const top = (one: Fields) => ({ token: text(one["token"]), logprob: number(one["logprob"]) });
const prob = (one: Fields): TokenProbs => ({ ...top(one), top: list(one["top"], top) });

function stats(one: Fields): Stats {
  return {
    promptTokens: number(one["promptTokens"]),
    cachedTokens: number(one["cachedTokens"]),
    tokens: number(one["tokens"]),
    tokensPerSecond: number(one["tokensPerSecond"]),
    firstTokenMs: number(one["firstTokenMs"]),
    ...(one["drafted"] === undefined ? {} : { drafted: number(one["drafted"]), accepted: number(one["accepted"]) }),
  };
}

const ROLES = ["user", "assistant", "tool"] as const;
/** Endings that the page explains to the user. */
const ENDINGS = ["length", "aborted", "interrupted"] as const;

/** Return a valid message. Throws an Error if that is impossible. */
export function message(value: unknown): Message {
  const one = fields(value);
  const role = ROLES.find((candidate) => candidate === one["role"]);
  if (!role || typeof one["id"] !== "string") throw new Error(labels.value.chat.incomplete);
  const found: Message = {
    id: one["id"],
    conversation: "",
    parent: typeof one["parent"] === "string" ? one["parent"] : null,
    role,
    content: text(one["content"]),
    created: number(one["created"]),
  };
  for (const name of ["reasoning", "toolCallId", "model", "group", "error", "stream"] as const) if (text(one[name])) found[name] = text(one[name]);
  if (number(one["thoughtMs"])) found.thoughtMs = number(one["thoughtMs"]);
  if (number(one["streamOffset"])) found.streamOffset = number(one["streamOffset"]);
  if (one["toolCalls"]) found.toolCalls = list(one["toolCalls"], call);
  if (one["attachments"]) found.attachments = list(one["attachments"], attachment).flat();
  if (one["probs"]) found.probs = list(one["probs"], prob);
  if (one["stats"]) found.stats = stats(fields(one["stats"]));
  const ending = ENDINGS.find((candidate) => candidate === one["ending"]);
  if (ending) found.ending = ending;
  return found;
}

/** Return valid settings, without automatic tools: a file must not make tools run without confirmation. */
function settings(value: unknown): Settings {
  const one = fields(value);
  const names = (value: unknown) => (Array.isArray(value) ? value.filter((each) => typeof each === "string") : []);
  return {
    ...NO_SETTINGS,
    model: text(one["model"]),
    system: text(one["system"]),
    schema: text(one["schema"]),
    tools: text(one["tools"]),
    probs: number(one["probs"]),
    parameters: { ...fields(one["parameters"]) },
    serverTools: names(one["serverTools"]),
  };
}

/** Return a valid conversation. Throws an Error if that is impossible. */
export function conversation(value: unknown): Conversation {
  const one = fields(value);
  if (typeof one["title"] !== "string") throw new Error(labels.value.chat.incomplete);
  return {
    id: "",
    title: one["title"].slice(0, 500),
    created: number(one["created"]),
    updated: number(one["updated"]),
    leaf: typeof one["leaf"] === "string" ? one["leaf"] : null,
    settings: settings(one["settings"]),
    ...(one["isPinned"] === true ? { isPinned: true } : {}),
    ...(text(one["folder"]) ? { folder: text(one["folder"]).slice(0, 500) } : {}),
  };
}

/** Throw an Error if a message is its own ancestor. */
export function checkTree(all: readonly Message[]): void {
  const parents = new Map(all.map((one) => [one.id, one.parent]));
  const good = new Set<string>();
  for (const { id } of all) {
    const way = new Set<string>();
    for (let at: string | null = id; at !== null && !good.has(at); at = parents.get(at) ?? null) {
      if (way.has(at)) throw new Error(labels.value.chat.ownAncestor);
      way.add(at);
    }
    for (const one of way) good.add(one);
  }
}
