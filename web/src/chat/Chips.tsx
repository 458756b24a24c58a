import { shown } from "../markdown/visible";
import { Icon } from "../ui/Icon";
import type { Attachment } from "./tree";

interface Given {
  files: readonly Attachment[];
  onChange: (files: Attachment[]) => void;
}

/** Files that go with a message, each with a button that takes it away. */
export function Chips({ files, onChange }: Given) {
  return (
    <>
      {files.map((one, index) => (
        <span key={index} class="chip">
          {shown(one.name)}
          <button
            class="quiet small"
            type="button"
            aria-label={`Remove ${one.name}`}
            onClick={() => onChange(files.filter((_, other) => other !== index))}
          >
            <Icon name="close" />
          </button>
        </span>
      ))}
    </>
  );
}
