import { useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { address } from "../shell/route";
import { labels } from "../text";
import { Menu } from "../ui/Menu";
import { deleteChats, duplicateChat, exportJson, exportMarkdown } from "./chatActions";
import { movedChats } from "./folders";
import { NameField } from "./NameField";
import { changeConversation, current } from "./store";
import { isBusy } from "./tasks";
import type { Conversation } from "./tree";

interface Props {
  chat: Conversation;
  onChosen: () => void;
  /** Set if chats are being selected. */
  selection?: { isSelected: boolean; onToggle: () => void } | undefined;
}

/** A chat in the list: its title, and a menu of actions. */
export function ChatRow({ chat, onChosen, selection }: Props) {
  const t = labels.value.chat;
  const [renames, setRenames] = useState(false);
  if (renames) {
    return <NameField label={t.chatTitle} name={chat.title} onSave={(title) => void changeConversation(chat, { title })} onDone={() => setRenames(false)} />;
  }
  if (selection) {
    return (
      <label class="chats-choice">
        <input type="checkbox" checked={selection.isSelected} onChange={selection.onToggle} /> <bdi>{displayText(chat.title)}</bdi>
      </label>
    );
  }
  return (
    <>
      <a
        href={address("chat", chat.id)}
        title={chat.title}
        aria-current={chat.id === current.value?.id ? "true" : undefined}
        onClick={onChosen}
        onDblClick={() => setRenames(true)}
      >
        <bdi>{displayText(chat.title)}</bdi>
        {isBusy(chat.id) && <i class="busy" role="img" aria-label={t.answering} title={t.answering} />}
      </a>
      <Menu
        icon="more"
        label={t.chatActions(chat.title)}
        items={[
          { icon: "pencil", label: t.rename, run: () => setRenames(true) },
          { icon: "pin", label: chat.isPinned ? t.unpin : t.pin, run: () => void changeConversation(chat, { isPinned: !chat.isPinned }) },
          { icon: "folder", label: t.folders.move, run: () => (movedChats.value = { chats: [chat] }) },
          { icon: "copy", label: t.duplicate, run: () => void duplicateChat(chat) },
          { icon: "file", label: t.exportMarkdown, run: () => void exportMarkdown(chat) },
          { icon: "file", label: t.exportJson, run: () => void exportJson([chat]) },
          { icon: "trash", label: labels.value.common.delete, disabled: isBusy(chat.id), run: () => void deleteChats([chat]) },
        ]}
      />
    </>
  );
}
