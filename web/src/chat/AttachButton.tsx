import { useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Modalities } from "../api/server";
import { MEDIA_TYPES } from "../media/formats";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";

interface Props {
  accepts: Modalities;
  onFiles: (files: File[]) => void;
}

/** True on phones and tablets, whose browsers open the camera for `capture`. */
const HAS_CAMERA = matchMedia("(pointer: coarse)");

/** Opens the file picker; if the model accepts pictures or sounds, a menu offers them and the camera too. */
export function AttachButton({ accepts, onFiles }: Props) {
  const [open, setOpen] = useState(false);
  const place = useRef<HTMLDivElement>(null);
  const files = useRef<HTMLInputElement>(null);
  const media = useRef<HTMLInputElement>(null);
  const camera = useRef<HTMLInputElement>(null);
  const hasMenu = accepts.image || accepts.audio;

  useLayoutEffect(() => {
    if (!open) return;
    place.current?.querySelector<HTMLElement>(".attach-menu button")?.focus();
    const closeOutside = (event: Event) => {
      if (!place.current?.contains(event.target as Node)) setOpen(false);
    };
    document.addEventListener("pointerdown", closeOutside);
    document.addEventListener("focusin", closeOutside);
    return () => {
      document.removeEventListener("pointerdown", closeOutside);
      document.removeEventListener("focusin", closeOutside);
    };
  }, [open]);

  function close() {
    setOpen(false);
    place.current?.querySelector("button")?.focus();
  }

  function choose(input: HTMLInputElement | null) {
    close();
    input?.click();
  }

  const input = (label: string, ref: typeof files, more: { accept?: string; capture?: "environment"; multiple?: boolean } = {}) => (
    <input
      ref={ref}
      class="hidden"
      type="file"
      multiple
      tabIndex={-1}
      aria-label={label}
      onChange={({ currentTarget }) => {
        const chosen = [...(currentTarget.files ?? [])];
        currentTarget.value = ""; // the same file can be chosen again
        onFiles(chosen);
      }}
      {...more}
    />
  );
  const types = [...(accepts.image ? MEDIA_TYPES.image : []), ...(accepts.audio ? MEDIA_TYPES.audio : [])];
  const mediaLabel = accepts.image ? (accepts.audio ? "Pictures or sounds" : "Pictures") : "Sounds";
  return (
    <div ref={place} class="attach" onKeyDown={(event) => event.key === "Escape" && open && (event.stopPropagation(), close())}>
      {hasMenu ? (
        <IconButton icon="plus" label="Attach" expanded={open} onClick={() => setOpen(!open)} />
      ) : (
        <IconButton icon="plus" label="Attach files" onClick={() => files.current?.click()} />
      )}
      {open && (
        <div class="attach-menu" role="group" aria-label="Attach">
          <button class="quiet" type="button" onClick={() => choose(media.current)}>
            <Icon name={accepts.image ? "image" : "mic"} /> {mediaLabel}
          </button>
          {accepts.image && HAS_CAMERA.matches && (
            <button class="quiet" type="button" onClick={() => choose(camera.current)}>
              <Icon name="camera" /> Take a photo
            </button>
          )}
          <button class="quiet" type="button" onClick={() => choose(files.current)}>
            <Icon name="file" /> Text files or PDF
          </button>
        </div>
      )}
      {input("Files to attach", files)}
      {hasMenu && input("Pictures or sounds to attach", media, { accept: types.join(",") })}
      {accepts.image && input("Photo to attach", camera, { accept: MEDIA_TYPES.image.join(","), capture: "environment", multiple: false })}
    </div>
  );
}
