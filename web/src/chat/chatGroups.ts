// Groups of the list of chats: pinned ones, folders, and the others by day.
import { labels } from "../text";
import { closedFolders, folderNames } from "./folders";
import { conversations } from "./store";
import type { Conversation } from "./tree";

const DAY_MS = 86_400_000;

export interface ChatGroup {
  label: string;
  isFolder: boolean;
  chats: readonly Conversation[];
}

function dayOf(chat: Conversation): string {
  const { today, yesterday, week, earlier } = labels.value.chat.days;
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - chat.updated) / DAY_MS);
  return days < 1 ? today : days < 2 ? yesterday : days < 7 ? week : earlier;
}

/** Return the groups of chats that have any. Pinned chats come first in their folder. */
export function groupChats(all: readonly Conversation[]): ChatGroup[] {
  const pinnedFirst = [...all.filter((one) => one.isPinned), ...all.filter((one) => !one.isPinned)];
  const others = pinnedFirst.filter((one) => !one.folder);
  const labelOf = (one: Conversation) => (one.isPinned ? labels.value.chat.pinned : dayOf(one));
  const days = [...new Set(others.filter((one) => !one.isPinned).map(labelOf))];
  const group = (label: string): ChatGroup => ({ label, isFolder: false, chats: others.filter((one) => labelOf(one) === label) });
  const folders = folderNames().map((label) => ({ label, isFolder: true, chats: pinnedFirst.filter((one) => one.folder === label) }));
  return [group(labels.value.chat.pinned), ...folders, ...days.map(group)].filter(({ chats }) => chats.length);
}

/** Return the chats in the order of the list, without those in closed folders. */
export function orderedChats(): Conversation[] {
  const open = groupChats(conversations.value).filter(({ isFolder, label }) => !isFolder || !closedFolders.value.includes(label));
  return open.flatMap(({ chats }) => chats);
}
