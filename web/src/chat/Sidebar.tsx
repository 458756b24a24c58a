import { useEffect, useRef, useState } from "preact/hooks";
import { shown } from "../markdown/visible";
import { address } from "../shell/route";
import { Icon } from "../ui/Icon";
import { isBusy } from "./answering";
import { type Conversation, conversations, current, exported, imported, isRead, removeConversation, rename, search } from "./store";

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

function renameByHand(one: Conversation): void {
  const title = prompt("Name of this chat", one.title);
  if (title !== null) void rename(one, title);
}

/** The conversations that are kept in this browser. */
export function Sidebar({ onChosen }: { onChosen: () => void }) {
  const [text, setText] = useState("");
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
      <a class="new" href={address("chat")} onClick={onChosen}>
        New chat
      </a>
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
                <a
                  href={address("chat", one.id)}
                  aria-current={one.id === current.value?.id ? "true" : undefined}
                  onClick={onChosen}
                  onDblClick={() => renameByHand(one)}
                >
                  <bdi>{shown(one.title)}</bdi>
                </a>
                <button class="quiet small" type="button" aria-label={`Rename ${one.title}`} onClick={() => renameByHand(one)}>
                  <Icon name="pencil" />
                </button>
                <button
                  class="quiet small"
                  type="button"
                  aria-label={`Delete ${one.title}`}
                  disabled={isBusy(one.id)}
                  onClick={() => {
                    if (confirm(`Delete “${one.title}”? It is kept nowhere else.`)) void removeConversation(one.id);
                  }}
                >
                  <Icon name="close" />
                </button>
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
