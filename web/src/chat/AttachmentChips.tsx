import { displayText } from "../markdown/displayText";
import { Icon } from "../ui/Icon";
import type { Attachment } from "./tree";

interface Props {
  files: readonly Attachment[];
  onChange: (files: Attachment[]) => void;
}

/** Attached files, each with a button that removes it. */
export function AttachmentChips({ files, onChange }: Props) {
  return (
    <>
      {files.map((one, index) => (
        <span key={index} class="chip">
          {displayText(one.name)}
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
