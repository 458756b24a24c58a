import { useState } from "preact/hooks";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { Menu } from "../ui/Menu";
import { removeFolder, renameFolder, toggleFolder } from "./folders";
import { NameField } from "./NameField";
import "./folders.css";

/** Head of a folder in the list: shows or hides its chats, and has a menu of actions. */
export function FolderHead({ name, count, isOpen }: { name: string; count: number; isOpen: boolean }) {
  const t = labels.value.chat.folders;
  const [renames, setRenames] = useState(false);
  if (renames) {
    return <NameField label={t.name} name={name} onSave={(after) => void renameFolder(name, after)} onDone={() => setRenames(false)} />;
  }
  return (
    <>
      <button class="folder" type="button" aria-expanded={isOpen} onClick={() => toggleFolder(name)}>
        <Icon name={isOpen ? "below" : "right"} /> <bdi>{displayText(name)}</bdi> <span class="count">{count}</span>
      </button>
      <Menu
        icon="more"
        label={t.actions(name)}
        items={[
          { icon: "pencil", label: labels.value.chat.rename, run: () => setRenames(true) },
          { icon: "trash", label: t.remove, run: () => void removeFolder(name) },
        ]}
      />
    </>
  );
}
