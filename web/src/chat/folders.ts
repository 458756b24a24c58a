// Folders of chats. A chat names its folder, and a folder exists as long as a chat names it.
import { signal } from "@preact/signals";
import { labels } from "../text";
import { notify } from "../ui/Notices";
import { persistentSignal } from "../ui/persistent";
import { changeConversation, conversations } from "./store";
import type { Conversation } from "./tree";

/** Names of the folders whose chats are hidden in the list. */
export const closedFolders = persistentSignal<readonly string[]>("closedFolders", []);

/** The chats for which the user chooses a folder; null if the dialog is closed. `onMoved` is called after the choice. */
export const movedChats = signal<{ chats: readonly Conversation[]; onMoved?: () => void } | null>(null);

/** Return the names of all folders, in alphabetical order. */
export function folderNames(): string[] {
  const names = new Set(conversations.value.map((one) => one.folder ?? "").filter(Boolean));
  return [...names].sort((a, b) => a.localeCompare(b));
}

export function toggleFolder(name: string): void {
  const others = closedFolders.value.filter((one) => one !== name);
  closedFolders.value = others.length < closedFolders.value.length ? others : [...others, name];
}

/** Move chats to a folder; "": to none. */
export async function moveChats(chats: readonly Conversation[], folder: string): Promise<void> {
  const ids = new Set(chats.map((one) => one.id));
  // The list may have newer states of the chats.
  for (const one of conversations.value.filter(({ id }) => ids.has(id))) await changeConversation(one, { folder });
}

function chatsIn(folder: string): Conversation[] {
  return conversations.value.filter((one) => one.folder === folder);
}

/** Rename a folder. If the new name is that of another folder, both become one. */
export async function renameFolder(before: string, after: string): Promise<void> {
  closedFolders.value = closedFolders.value.map((one) => (one === before ? after : one));
  await moveChats(chatsIn(before), after);
}

/** Remove a folder; its chats stay. A notice offers to restore it. */
export async function removeFolder(name: string): Promise<void> {
  const t = labels.value.chat;
  const chats = chatsIn(name);
  await moveChats(chats, "");
  notify(t.folders.removed(name), [t.undo, () => void moveChats(chats, name)]);
}
