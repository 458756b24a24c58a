import { useEffect, useRef, useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { address, navigate } from "../shell/route";
import { Icon } from "../ui/Icon";
import { askConfirmation } from "../ui/Confirm";
import { IconButton } from "../ui/IconButton";
import { isBusy } from "./actions";
import { conversations, current, isListLoaded, removeConversation, rename, search } from "./store";
import { exportConversations, importConversations } from "./transfer";
import type { Conversation } from "./tree";

const DAY_MS = 86_400_000;

function dayGroup(updated: number): string {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - updated) / DAY_MS);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 7 ? "This week" : "Earlier";
}

function download(name: string, value: unknown): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(value, null, 1)], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

async function remove(one: Conversation): Promise<void> {
  if (await askConfirmation(`Delete “${one.title}”?`, "It is stored in this browser only. This cannot be undone.", "Delete")) {
    if (current.value?.id === one.id) navigate("chat");
    await removeConversation(one.id);
  }
}

/** List of the conversations in this browser. */
export function Sidebar({ onChosen, onClose }: { onChosen: () => void; onClose: () => void }) {
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
      setStatus(`${count} conversation${count === 1 ? "" : "s"} imported`);
    } catch (error) {
      setStatus(error instanceof SyntaxError ? "This file is not JSON." : (error as Error).message);
    }
    file.current!.value = "";
  }

  async function exportAll() {
    try {
      const all = await exportConversations(conversations.value.map((one) => one.id));
      download(`llamado-chats-${new Date().toISOString().slice(0, 10)}.json`, all);
    } catch (error) {
      setStatus(`The chats were not exported: ${(error as Error).message}`);
    }
  }

  const listed = conversations.value.filter((one) => !found || found.has(one.id));
  let last = "";
  return (
    <aside class="sidebar" aria-label="Chats">
      <div class="sidebar-head">
        <a class="new" href={address("chat")} onClick={onChosen}>
          <Icon name="plus" /> New chat
        </a>
        <IconButton kind="narrow" icon="close" label="Close chat list" onClick={onClose} />
      </div>
      <input
        type="search"
        placeholder="Search"
        aria-label="Search chats"
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
                      {isBusy(one.id) && <i class="busy" title="answer in progress" />}
                    </a>
                    <IconButton icon="pencil" label={`Rename ${one.title}`} onClick={() => setRenamed(one.id)} />
                    <IconButton icon="trash" label={`Delete ${one.title}`} disabled={isBusy(one.id)} onClick={() => void remove(one)} />
                  </>
                )}
              </li>
            </>
          );
        })}
        {!listed.length && isListLoaded.value && <li class="chats-head">{found ? "Nothing found" : "Chats are stored in this browser only."}</li>}
      </ul>
      <div class="sidebar-foot">
        <button class="quiet small" type="button" disabled={!conversations.value.length} onClick={() => void exportAll()}>
          Export
        </button>
        <button class="quiet small" type="button" onClick={() => file.current?.click()}>
          Import
        </button>
        <input
          ref={file}
          class="hidden"
          type="file"
          accept="application/json,.json,.jsonl"
          aria-label="Chat file"
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
      aria-label="Chat title"
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
        void rename(chat, event.currentTarget.value);
        onDone();
      }}
    />
  );
}
