import { useEffect, useRef, useState } from "preact/hooks";
import { shown } from "../markdown/visible";
import { address, go } from "../shell/route";
import { Icon } from "../ui/Icon";
import { confirmed } from "../ui/Confirm";
import { IconButton } from "../ui/IconButton";
import { isBusy } from "./answering";
import { conversations, current, exported, imported, isRead, removeConversation, rename, search } from "./store";
import type { Conversation } from "./tree";

const DAY_MS = 86_400_000;

function group(updated: number): string {
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
  if (await confirmed(`Delete “${one.title}”?`, "It is kept nowhere else than in this browser.", "Delete")) {
    if (current.value?.id === one.id) go("chat");
    await removeConversation(one.id);
  }
}

/** The conversations that are kept in this browser. */
export function Sidebar({ onChosen, onClose }: { onChosen: () => void; onClose: () => void }) {
  const [text, setText] = useState("");
  const [renamed, setRenamed] = useState("");
  const [found, setFound] = useState<Set<string> | null>(null);
  const [said, setSaid] = useState("");
  const file = useRef<HTMLInputElement>(null);

  useEffect(() => {
    if (!text.trim()) {
      setFound(null);
      return;
    }
    let wanted = true;
    const timer = setTimeout(() => void search(text.trim()).then((ids) => wanted && setFound(ids)), 120);
    return () => {
      wanted = false;
      clearTimeout(timer);
    };
  }, [text, conversations.value]);

  async function importFile() {
    const chosen = file.current?.files?.[0];
    if (!chosen) return;
    try {
      const count = await imported(JSON.parse(await chosen.text()));
      setSaid(`${count} conversation${count === 1 ? "" : "s"} imported`);
    } catch (error) {
      setSaid(error instanceof SyntaxError ? "This file is no JSON." : (error as Error).message);
    }
    file.current!.value = "";
  }

  const listed = conversations.value.filter((one) => !found || found.has(one.id));
  let last = "";
  return (
    <aside class="sidebar" aria-label="Chats">
      <div class="sidebar-head">
        <a class="new" href={address("chat")} onClick={onChosen}>
          <Icon name="plus" /> New chat
        </a>
        <IconButton kind="narrow" icon="close" label="Close the list of chats" onClick={onClose} />
      </div>
      <input
        type="search"
        placeholder="Search"
        aria-label="Search in chats"
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <ul class="chats">
        {listed.map((one) => {
          const here = group(one.updated);
          const head = here !== last ? <li class="chats-head">{(last = here)}</li> : null;
          return (
            <>
              {head}
              <li key={one.id} class="chats-row">
                {renamed === one.id ? (
                  <Renaming chat={one} onDone={() => setRenamed("")} />
                ) : (
                  <>
                    <a
                      href={address("chat", one.id)}
                      title={one.title}
                      aria-current={one.id === current.value?.id ? "true" : undefined}
                      onClick={onChosen}
                      onDblClick={() => setRenamed(one.id)}
                    >
                      <bdi>{shown(one.title)}</bdi>
                      {isBusy(one.id) && <i class="busy" title="an answer is being made" />}
                    </a>
                    <IconButton icon="pencil" label={`Rename ${one.title}`} onClick={() => setRenamed(one.id)} />
                    <IconButton icon="trash" label={`Delete ${one.title}`} disabled={isBusy(one.id)} onClick={() => void remove(one)} />
                  </>
                )}
              </li>
            </>
          );
        })}
        {!listed.length && isRead.value && <li class="chats-head">{found ? "Nothing found" : "Chats are kept in this browser only."}</li>}
      </ul>
      <div class="sidebar-foot">
        <button
          class="quiet small"
          type="button"
          disabled={!conversations.value.length}
          onClick={() =>
            void exported(conversations.value.map((one) => one.id)).then((all) =>
              download(`llamado-chats-${new Date().toISOString().slice(0, 10)}.json`, all),
            )
          }
        >
          Export
        </button>
        <button class="quiet small" type="button" onClick={() => file.current?.click()}>
          Import
        </button>
        <input
          ref={file}
          class="hidden"
          type="file"
          accept="application/json,.json"
          aria-label="File of chats"
          tabIndex={-1}
          onChange={() => void importFile()}
        />
        <span role="status">{said}</span>
      </div>
    </aside>
  );
}

/** A chat's name while it is changed: Enter and leaving the field keep it, Escape does not. */
function Renaming({ chat, onDone }: { chat: Conversation; onDone: () => void }) {
  const left = useRef(false);
  return (
    <input
      type="text"
      aria-label="Name of this chat"
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
