// Pictures and sounds of a message or a draft.
import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { type Attachment, isMedia, type MediaFile } from "../chat/tree";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { formatBytes } from "../ui/format";
import { IconButton } from "../ui/IconButton";
import { kindOf, savedName } from "./formats";
import "./media.css";

/** The picture that is shown enlarged. */
const enlarged = signal<MediaFile | null>(null);

/** Return a URL of a blob that is valid while the component is shown. */
function useBlobUrl(blob: Blob): string {
  const url = useMemo(() => URL.createObjectURL(blob), [blob]);
  useEffect(() => () => URL.revokeObjectURL(url), [url]);
  return url;
}

interface Props {
  file: MediaFile;
  /** Shown beside its name, such as a button. */
  children?: ComponentChildren;
}

/** One picture, which a click enlarges, or one sound. */
export function MediaView({ file, children }: Props) {
  const url = useBlobUrl(file.blob);
  const name = displayText(file.name);
  const facts = [formatBytes(file.blob.size), file.tokens === undefined ? "" : labels.value.common.tokens(file.tokens)].filter(Boolean).join(" · ");
  return (
    <figure class={`media ${kindOf(file.blob.type)}`}>
      {kindOf(file.blob.type) === "image" ? (
        <button class="quiet" type="button" title={labels.value.media.enlarge(file.name)} onClick={() => (enlarged.value = file)}>
          <img src={url} alt={file.name} />
        </button>
      ) : (
        <audio controls preload="metadata" src={url} aria-label={file.name} />
      )}
      <figcaption>
        <span class="name">{name}</span>
        {children}
        <span class="facts">{facts}</span>
      </figcaption>
    </figure>
  );
}

/** The pictures and sounds of a message. */
export function MediaRow({ attachments = [] }: { attachments: readonly Attachment[] | undefined }) {
  const files = attachments.filter(isMedia);
  if (!files.length) return null;
  return (
    <div class="media-row">
      {files.map((file, index) => (
        <MediaView key={index} file={file} />
      ))}
    </div>
  );
}

/** The dialog that shows an enlarged picture; once per view. Escape or a click closes it. */
export function PictureDialog() {
  const file = enlarged.value;
  return file && <EnlargedPicture key={file.name} file={file} />;
}

function EnlargedPicture({ file }: { file: MediaFile }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const url = useBlobUrl(file.blob);
  useEffect(() => dialog.current?.showModal(), []);
  const close = () => dialog.current?.close(); // also returns the focus to the picture in the message
  return (
    <dialog ref={dialog} class="picture-dialog" aria-label={file.name} onClose={() => (enlarged.value = null)} onClick={close}>
      <div class="row ends">
        <b class="name">{displayText(file.name)}</b>
        <a href={url} download={savedName(file.name, file.blob.type)} onClick={(event) => event.stopPropagation()}>
          {labels.value.common.save}
        </a>
        <IconButton icon="close" label={labels.value.media.closePicture} onClick={close} />
      </div>
      <img src={url} alt={file.name} />
    </dialog>
  );
}
