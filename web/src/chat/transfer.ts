// Export and import of conversations. A picture or sound becomes a `data:` URI.
import { toDataUri } from "../media/dataUri";
import { labels } from "../text";
import { fromChatGpt } from "./chatgpt";
import type { WholeConversation } from "./database";
import { fileText } from "./generate";
import { fromLlamaCpp } from "./llamacpp";
import { fromOpenWebUi } from "./openwebui";
import { addConversations, conversations, messagesOf, newId } from "./store";
import { type Attachment, type Conversation, isMedia, type Message, path } from "./tree";
import { explainStorage } from "./unsaved";
import * as validate from "./validate";

export type ExportedAttachment = { name: string; text: string } | { name: string; data: string; tokens?: number };
export type ExportedMessage = Omit<Message, "attachments"> & { attachments?: ExportedAttachment[] };

export interface ExportedConversation {
  conversation: Conversation;
  messages: ExportedMessage[];
}

export interface ExportFile {
  format: "llamado-conversations";
  version: 1;
  conversations: ExportedConversation[];
}

async function exportAttachment(one: Attachment): Promise<ExportedAttachment> {
  if (!isMedia(one)) return one;
  const { blob, ...rest } = one;
  return { ...rest, data: await toDataUri(blob) };
}

async function exportMessage({ attachments, ...message }: Message): Promise<ExportedMessage> {
  return attachments ? { ...message, attachments: await Promise.all(attachments.map(exportAttachment)) } : message;
}

/** Return a conversation as JSON, for a file or the server. */
export async function exportWhole({ conversation, messages }: WholeConversation): Promise<ExportedConversation> {
  return { conversation, messages: await Promise.all(messages.map(exportMessage)) };
}

/** Return a valid conversation from `exportWhole`, with its ids. Throws an Error if it is invalid. */
export function importWhole(value: unknown, id: string): { conversation: Conversation; messages: Message[] } {
  const { conversation, messages } = validWhole(value);
  return { conversation: { ...conversation, id }, messages: messages.map((one) => ({ ...one, conversation: id })) };
}

export async function exportConversations(ids: readonly string[]): Promise<ExportFile> {
  const selected = conversations.value.filter((one) => ids.includes(one.id));
  return {
    format: "llamado-conversations",
    version: 1,
    conversations: await Promise.all(
      selected.map(async (conversation) => exportWhole({ conversation, messages: await messagesOf(conversation.id) })),
    ),
  };
}

/** Return the conversations in a file of this page or of another program, not yet validated. */
function parse(text: string): unknown[] {
  const lines = fromLlamaCpp(text);
  if (lines) return lines;
  const content = JSON.parse(text) as Partial<ExportFile> | null;
  const found = fromChatGpt(content) ?? fromOpenWebUi(content);
  if (found) return found;
  if (content?.format !== "llamado-conversations" || content.version !== 1 || !Array.isArray(content.conversations)) {
    throw new Error(labels.value.chat.notChats);
  }
  return content.conversations;
}

/** Return a valid conversation. Throws an Error if it is invalid. */
function validWhole(value: unknown): { conversation: Conversation; messages: Message[] } {
  const one = value as { conversation?: unknown; messages?: unknown } | null;
  const conversation = validate.conversation(one?.conversation);
  if (!Array.isArray(one?.messages)) throw new Error(labels.value.chat.incomplete);
  const originals = one.messages.map(validate.message);
  validate.checkTree(originals);
  return { conversation, messages: originals };
}

/** Return a copy with new ids. */
export function withNewIds(conversation: Conversation, originals: readonly Message[]): { conversation: Conversation; messages: Message[] } {
  const ids = new Map(originals.map((message) => [message.id, newId()]));
  const newIdOf = (id: string | null) => (id === null ? null : (ids.get(id) ?? null));
  const id = newId();
  return {
    conversation: { ...conversation, id, title: conversation.title || labels.value.chat.newChat, leaf: newIdOf(conversation.leaf) },
    messages: originals.map((message) => ({
      ...message,
      id: newIdOf(message.id)!,
      conversation: id,
      parent: newIdOf(message.parent),
    })),
  };
}

/** Store a copy of a conversation and return its id. */
export async function duplicateConversation(original: Conversation, title: string): Promise<string> {
  const now = Date.now();
  const { conversation, messages } = withNewIds({ ...original, title, created: now, updated: now }, await messagesOf(original.id));
  await addConversations([{ conversation, messages }]);
  return conversation.id;
}

/** Return the shown branch of a conversation as Markdown. */
export async function exportMarkdown({ id, title, leaf }: Conversation): Promise<string> {
  const all = new Map((await messagesOf(id)).map((one) => [one.id, one]));
  return [`# ${title}`, ...path(all, leaf).map(messageAsMarkdown)].join("\n\n").trimEnd() + "\n";
}

function messageAsMarkdown({ role, model, content, attachments = [], toolCalls = [] }: Message): string {
  const { common, chat } = labels.value;
  const name = { user: common.you, assistant: model || common.model, tool: chat.toolResult }[role];
  const files = attachments.map((one) => (isMedia(one) ? `*${one.name}*` : fileText(one)));
  const calls = toolCalls.map((call) => `\`${call.name}(${call.arguments})\``);
  return [`## ${name}`, ...files, role === "tool" ? `\`\`\`\n${content}\n\`\`\`` : content, ...calls].filter(Boolean).join("\n\n");
}

/**
 * Import the text of a file made by `exportConversations`, the page of llama.cpp's server, Open WebUI or ChatGPT. Return
 * the number of conversations. Throws a SyntaxError for text that is not JSON, and an Error for any other file.
 */
export async function importConversations(text: string): Promise<number> {
  const copies = parse(text)
    .map(validWhole)
    .map(({ conversation, messages }) => withNewIds(conversation, messages));
  try {
    await addConversations(copies);
  } catch (error) {
    throw new Error(labels.value.chat.notImported(explainStorage(error)));
  }
  return copies.length;
}
