import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { MediaView } from "../media/MediaView";
import { type Attachment, isMedia } from "./tree";

interface Props<File extends Attachment> {
  files: readonly File[];
  onChange: (files: File[]) => void;
}

/** Attached files, each with a button that removes it. */
export function AttachmentChips<File extends Attachment>({ files, onChange }: Props<File>) {
  return (
    <>
      {files.map((one, index) => {
        const remove = (
          <button
            class="quiet small remove"
            type="button"
            aria-label={labels.value.common.remove(one.name)}
            onClick={() => onChange(files.filter((_, other) => other !== index))}
          >
            <Icon name="close" />
          </button>
        );
        return isMedia(one) ? (
          <MediaView key={index} file={one}>
            {remove}
          </MediaView>
        ) : (
          <span key={index} class="chip">
            {displayText(one.name)}
            {remove}
          </span>
        );
      })}
    </>
  );
}
