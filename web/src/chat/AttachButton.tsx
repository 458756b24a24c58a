import { useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Modalities } from "../api/server";
import { MEDIA_TYPES } from "../media/formats";
import { labels } from "../text";
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
  const t = labels.value.chat;
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
      hidden
      type="file"
      multiple
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
  const mediaLabel = accepts.image ? (accepts.audio ? t.picturesOrSounds : t.pictures) : t.sounds;
  return (
    <div ref={place} class="attach" onKeyDown={(event) => event.key === "Escape" && open && (event.stopPropagation(), close())}>
      {hasMenu ? (
        <IconButton icon="plus" label={t.attach} expanded={open} onClick={() => setOpen(!open)} />
      ) : (
        <IconButton icon="plus" label={t.attachFiles} onClick={() => files.current?.click()} />
      )}
      {open && (
        <div class="attach-menu" role="group" aria-label={t.attach}>
          <button class="quiet" type="button" onClick={() => choose(media.current)}>
            <Icon name={accepts.image ? "image" : "mic"} /> {mediaLabel}
          </button>
          {accepts.image && HAS_CAMERA.matches && (
            <button class="quiet" type="button" onClick={() => choose(camera.current)}>
              <Icon name="camera" /> {t.takePhoto}
            </button>
          )}
          <button class="quiet" type="button" onClick={() => choose(files.current)}>
            <Icon name="file" /> {t.textOrPdf}
          </button>
        </div>
      )}
      {input(t.filesToAttach, files)}
      {hasMenu && input(t.mediaToAttach, media, { accept: types.join(",") })}
      {accepts.image && input(t.photoToAttach, camera, { accept: MEDIA_TYPES.image.join(","), capture: "environment", multiple: false })}
    </div>
  );
}
