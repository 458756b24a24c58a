import { Fragment } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { props } from "../api/server";
import { displayText } from "../markdown/displayText";
import { address } from "../shell/route";
import { isHelpOpen } from "../shell/shortcuts";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { Lazy } from "../ui/Lazy";
import { deleteChats, exportJson, importFile } from "./chatActions";
import { groupChats } from "./chatGroups";
import { ChatRow } from "./ChatRow";
import { FolderHead } from "./FolderHead";
import { closedFolders, movedChats } from "./folders";
import { remoteFailure } from "./remoteFailure";
import { conversations, isListLoaded, search } from "./store";
import type { Conversation } from "./tree";

const SEARCH_PAUSE_MS = 120;

const loadFolderDialog = async () => (await import("./FolderDialog")).FolderDialog;

/** List of the conversations in this browser. */
export function Sidebar({ onChosen, onClose }: { onChosen: () => void; onClose: () => void }) {
  const t = labels.value.chat;
  const [text, setText] = useState("");
  const found = useSearch(text);
  /** Ids of the selected chats; null if none are being selected. */
  const [selected, setSelected] = useState<ReadonlySet<string> | null>(null);

  function toggle(id: string) {
    const left = new Set(selected);
    if (!left.delete(id)) left.add(id);
    setSelected(left);
  }

  const groups = groupChats(conversations.value.filter((one) => !found || found.has(one.id)));
  const listed = groups.flatMap(({ chats }) => chats);
  return (
    <aside class="sidebar" aria-label={t.chats}>
      <div class="sidebar-head">
        <a class="new" href={address("chat")} onClick={onChosen}>
          <Icon name="plus" /> {t.newChat}
        </a>
        <IconButton kind="narrow" icon="close" label={t.closeList} onClick={onClose} />
      </div>
      <input
        id="search-chats"
        type="search"
        placeholder={t.search}
        aria-label={t.searchChats}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <ul class="chats">
        {groups.map(({ label, isFolder, chats }) => {
          const isOpen = !isFolder || found !== null || selected !== null || !closedFolders.value.includes(label);
          return (
            <Fragment key={`${isFolder} ${label}`}>
              <li class={isFolder ? "chats-row chats-folder" : "chats-head"}>
                {isFolder ? <FolderHead name={label} count={chats.length} isOpen={isOpen} /> : label}
              </li>
              {(isOpen ? chats : []).map((one) => (
                <li key={one.id} class={isFolder ? "chats-row in-folder" : "chats-row"}>
                  <ChatRow
                    chat={one}
                    onChosen={onChosen}
                    selection={selected ? { isSelected: selected.has(one.id), onToggle: () => toggle(one.id) } : undefined}
                  />
                </li>
              ))}
            </Fragment>
          );
        })}
        {!listed.length && isListLoaded.value && <li class="chats-head">{found ? t.nothingFound : props.value.chats_kept ? t.keptOnServer : t.storedHere}</li>}
      </ul>
      {remoteFailure.value && <p class="notice">{displayText(t.notKept(remoteFailure.value))}</p>}
      {selected ? (
        <SelectionFoot chats={listed.filter((one) => selected.has(one.id))} onDone={() => setSelected(null)} />
      ) : (
        <Foot onSelect={() => setSelected(new Set())} />
      )}
      {movedChats.value && <Lazy load={loadFolderDialog} />}
    </aside>
  );
}

/** Return the ids of the chats that contain a text; null if there is none. */
function useSearch(text: string): ReadonlySet<string> | null {
  const [found, setFound] = useState<ReadonlySet<string> | null>(null);
  useEffect(() => {
    if (!text.trim()) {
      setFound(null);
      return;
    }
    let isCurrent = true;
    const timer = setTimeout(() => void search(text.trim()).then((ids) => isCurrent && setFound(ids)), SEARCH_PAUSE_MS);
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [text, conversations.value]);
  return found;
}

function Foot({ onSelect }: { onSelect: () => void }) {
  const t = labels.value.chat;
  const file = useRef<HTMLInputElement>(null);
  const isEmpty = !conversations.value.length;
  return (
    <div class="sidebar-foot">
      <button class="quiet small" type="button" disabled={isEmpty} onClick={onSelect}>
        {t.select}
      </button>
      <button class="quiet small" type="button" disabled={isEmpty} onClick={() => void exportJson(conversations.value)}>
        {t.export}
      </button>
      <button class="quiet small" type="button" onClick={() => file.current?.click()}>
        {t.import}
      </button>
      <button class="quiet small keys-only" type="button" onClick={() => (isHelpOpen.value = true)}>
        {t.shortcuts}
      </button>
      <input
        ref={file}
        hidden
        type="file"
        accept="application/json,.json,.jsonl"
        aria-label={t.chatFile}
        onChange={({ currentTarget }) => {
          const chosen = currentTarget.files?.[0];
          if (chosen) void importFile(chosen);
          currentTarget.value = ""; // the same file can be chosen again
        }}
      />
    </div>
  );
}

/** Actions for the selected chats. */
function SelectionFoot({ chats, onDone }: { chats: readonly Conversation[]; onDone: () => void }) {
  const t = labels.value.chat;
  return (
    <div class="sidebar-foot" role="group" aria-label={t.selected(chats.length)}>
      <span role="status">{t.selected(chats.length)}</span>
      <button class="quiet small" type="button" disabled={!chats.length} onClick={() => void exportJson(chats)}>
        {t.export}
      </button>
      <button class="quiet small" type="button" disabled={!chats.length} onClick={() => (movedChats.value = { chats, onMoved: onDone })}>
        {t.folders.moveSelected}
      </button>
      <button class="quiet small" type="button" disabled={!chats.length} onClick={() => (void deleteChats(chats), onDone())}>
        {labels.value.common.delete}
      </button>
      <button class="quiet small" type="button" onClick={onDone}>
        {t.doneSelecting}
      </button>
    </div>
  );
}
