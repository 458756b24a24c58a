import { useEffect, useRef, useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { address, navigate } from "../shell/route";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { askConfirmation } from "../ui/Confirm";
import { IconButton } from "../ui/IconButton";

import { conversations, current, isListLoaded, changeConversation, removeConversation, search } from "./store";
import { isBusy } from "./tasks";
import { exportConversations, importConversations } from "./transfer";
import type { Conversation } from "./tree";

const DAY_MS = 86_400_000;

function dayGroup(updated: number): string {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - updated) / DAY_MS);
  const t = labels.value.chat.days;
  return days < 1 ? t.today : days < 2 ? t.yesterday : days < 7 ? t.week : t.earlier;
}

function download(name: string, value: unknown): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function remove(one: Conversation): Promise<void> {
  const t = labels.value.chat;
  if (await askConfirmation(t.deleteChatTitle(one.title), t.deleteChatText, labels.value.common.delete)) {
    if (current.value?.id === one.id) navigate("chat");
    await removeConversation(one.id);
  }
}

/** List of the conversations in this browser. */
export function Sidebar({ onChosen, onClose }: { onChosen: () => void; onClose: () => void }) {
  const t = labels.value.chat;
  const [text, setText] = useState("");
  const [renamed, setRenamed] = useState("");
  const [found, setFound] = useState<Set<string> | null>(null);
  const [status, setStatus] = useState("");
  const file = useRef<HTMLInputElement>(null);

  useEffect(() => {
    if (!text.trim()) {
      setFound(null);
      return;
    }
    let isCurrent = true;
    const timer = setTimeout(() => void search(text.trim()).then((ids) => isCurrent && setFound(ids)), 120);
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [text, conversations.value]);

  async function importFile() {
    const chosen = file.current?.files?.[0];
    if (!chosen) return;
    try {
      const count = await importConversations(await chosen.text());
      setStatus(t.imported(count));
    } catch (error) {
      setStatus(error instanceof SyntaxError ? t.notJson : (error as Error).message);
    }
    file.current!.value = "";
  }

  async function exportAll() {
    try {
      const all = await exportConversations(conversations.value.map((one) => one.id));
      download(`llamado-chats-${new Date().toISOString().slice(0, 10)}.json`, all);
    } catch (error) {
      setStatus(t.notExported((error as Error).message));
    }
  }

  const listed = conversations.value.filter((one) => !found || found.has(one.id));
  let last = "";
  return (
    <aside class="sidebar" aria-label={t.chats}>
      <div class="sidebar-head">
        <a class="new" href={address("chat")} onClick={onChosen}>
          <Icon name="plus" /> {t.newChat}
        </a>
        <IconButton kind="narrow" icon="close" label={t.closeList} onClick={onClose} />
      </div>
      <input
        type="search"
        placeholder={t.search}
        aria-label={t.searchChats}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <ul class="chats">
        {listed.map((one) => {
          const here = dayGroup(one.updated);
          const head = here !== last ? <li class="chats-head">{(last = here)}</li> : null;
          return (
            <>
              {head}
              <li key={one.id} class="chats-row">
                {renamed === one.id ? (
                  <TitleEditor chat={one} onDone={() => setRenamed("")} />
                ) : (
                  <>
                    <a
                      href={address("chat", one.id)}
                      title={one.title}
                      aria-current={one.id === current.value?.id ? "true" : undefined}
                      onClick={onChosen}
                      onDblClick={() => setRenamed(one.id)}
                    >
                      <bdi>{displayText(one.title)}</bdi>
                      {isBusy(one.id) && <i class="busy" title={t.answering} />}
                    </a>
                    <IconButton icon="pencil" label={t.renameChat(one.title)} onClick={() => setRenamed(one.id)} />
                    <IconButton icon="trash" label={t.deleteChat(one.title)} disabled={isBusy(one.id)} onClick={() => void remove(one)} />
                  </>
                )}
              </li>
            </>
          );
        })}
        {!listed.length && isListLoaded.value && <li class="chats-head">{found ? t.nothingFound : t.storedHere}</li>}
      </ul>
      <div class="sidebar-foot">
        <button class="quiet small" type="button" disabled={!conversations.value.length} onClick={() => void exportAll()}>
          {t.export}
        </button>
        <button class="quiet small" type="button" onClick={() => file.current?.click()}>
          {t.import}
        </button>
        <input
          ref={file}
          class="hidden"
          type="file"
          accept="application/json,.json,.jsonl"
          aria-label={t.chatFile}
          tabIndex={-1}
          onChange={() => void importFile()}
        />
        <span role="status">{status}</span>
      </div>
    </aside>
  );
}

/** Edits a chat's title: Enter or leaving the field saves it, Escape cancels. */
function TitleEditor({ chat, onDone }: { chat: Conversation; onDone: () => void }) {
  const left = useRef(false);
  return (
    <input
      type="text"
      aria-label={labels.value.chat.chatTitle}
      defaultValue={chat.title}
      ref={(field) => {
        if (field && document.activeElement !== field && !left.current) field.select();
      }}
      onKeyDown={(event) => {
        if (event.key === "Escape") (left.current = true), onDone();
        else if (event.key === "Enter") event.currentTarget.blur();
      }}
      onBlur={(event) => {
        if (left.current) return;
        left.current = true;
        void changeConversation(chat, { title: event.currentTarget.value.trim() || chat.title });
        onDone();
      }}
    />
  );
}
