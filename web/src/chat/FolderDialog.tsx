import { useEffect, useRef } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { folderNames, movedChats, moveChats } from "./folders";

/** Dialog that moves chats to a folder, to a new one, or out of their folder. */
export function FolderDialog() {
  const t = labels.value.chat.folders;
  const dialog = useRef<HTMLDialogElement>(null);
  const name = useRef<HTMLInputElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const { chats, onMoved } = movedChats.value!;

  function move(folder: string) {
    dialog.current?.close();
    void moveChats(chats, folder);
    onMoved?.();
  }

  return (
    <dialog ref={dialog} class="folders" aria-labelledby="folders-title" onClose={() => (movedChats.value = null)}>
      <div class="row">
        <h2 id="folders-title">{t.title}</h2>
        <IconButton icon="close" label={labels.value.common.close} onClick={() => dialog.current?.close()} />
      </div>
      <ul>
        {folderNames().map((one) => (
          <li key={one}>
            <button class="quiet" type="button" onClick={() => move(one)}>
              <Icon name="folder" /> <bdi>{displayText(one)}</bdi>
            </button>
          </li>
        ))}
        {chats.some((one) => one.folder) && (
          <li>
            <button class="quiet" type="button" onClick={() => move("")}>
              <Icon name="close" /> {t.none}
            </button>
          </li>
        )}
      </ul>
      <form
        class="row"
        onSubmit={(event) => {
          event.preventDefault();
          const chosen = name.current!.value.trim();
          if (chosen) move(chosen);
        }}
      >
        <input ref={name} type="text" required maxLength={100} placeholder={t.new} aria-label={t.new} />
        <button class="primary" type="submit">
          {t.create}
        </button>
      </form>
    </dialog>
  );
}
