// Actions for chats in the list: delete, duplicate, export, import.
import { address, navigate } from "../shell/route";
import { labels } from "../text";
import { download } from "../ui/download";
import { notify } from "../ui/Notices";
import { current, removeConversation } from "./store";
import { isBusy } from "./tasks";
import type { Conversation } from "./tree";

/** Functions for files, loaded when they are first needed. */
const transfer = () => import("./transfer");

/** Delete chats without work in progress. A notice offers to restore them. */
export async function deleteChats(chats: readonly Conversation[]): Promise<void> {
  const t = labels.value.chat;
  const gone = chats.filter((one) => !isBusy(one.id));
  const shown = gone.find((one) => one.id === current.value?.id);
  if (shown) navigate("chat");
  const undos = await Promise.all(gone.map((one) => removeConversation(one.id)));
  if (!undos.length) return;
  notify(t.chatsDeleted(undos.length), [
    t.undo,
    async () => {
      await Promise.all(undos.map((undo) => undo()));
      if (shown) navigate("chat", shown.id);
    },
  ]);
}

/** Copy a chat and open the copy. */
export async function duplicateChat(chat: Conversation): Promise<void> {
  const id = await (await transfer()).duplicateConversation(chat, labels.value.chat.copyOf(chat.title));
  location.assign(address("chat", id));
}

export async function exportJson(chats: readonly Conversation[]): Promise<void> {
  const t = labels.value.chat;
  try {
    const all = await (await transfer()).exportConversations(chats.map((one) => one.id));
    const name = chats.length === 1 ? fileName(chats[0]!.title) : `llamado-chats-${new Date().toISOString().slice(0, 10)}`;
    download(`${name}.json`, JSON.stringify(all, null, 1), "application/json");
  } catch (error) {
    notify(t.notExported((error as Error).message));
  }
}

export async function exportMarkdown(chat: Conversation): Promise<void> {
  download(`${fileName(chat.title)}.md`, await (await transfer()).exportMarkdown(chat), "text/markdown");
}

/** Import the chats of a file, and report the result. */
export async function importFile(file: File): Promise<void> {
  const t = labels.value.chat;
  try {
    const count = await (await transfer()).importConversations(await file.text());
    notify(t.imported(count));
  } catch (error) {
    notify(error instanceof SyntaxError ? t.notJson : (error as Error).message);
  }
}

/** Return a file name without characters that systems reject. */
function fileName(title: string): string {
  return title.replace(/[^\p{L}\p{N} ._-]+/gu, "").trim().slice(0, 80) || "chat";
}
