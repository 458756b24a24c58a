// Files dropped on the page.
import { useEffect, useState } from "preact/hooks";

export function hasFiles(data: DataTransfer | null): data is DataTransfer {
  return data?.types.includes("Files") ?? false;
}

/** Call `onFiles` with the files that are dropped anywhere on the page. Returns true while files are dragged over it. */
export function useDrop(onFiles: (files: File[]) => void): boolean {
  const [isOver, setOver] = useState(false);
  useEffect(() => {
    // Files dropped anywhere else would replace the page.
    const onDragOver = (event: DragEvent) => {
      if (!hasFiles(event.dataTransfer)) return;
      event.preventDefault();
      setOver(true);
    };
    const onDragLeave = (event: DragEvent) => {
      if (!event.relatedTarget) setOver(false);
    };
    const onDrop = (event: DragEvent) => {
      if (!hasFiles(event.dataTransfer)) return;
      event.preventDefault();
      setOver(false);
      onFiles([...event.dataTransfer.files]);
    };
    addEventListener("dragover", onDragOver);
    addEventListener("dragleave", onDragLeave);
    addEventListener("drop", onDrop);
    return () => {
      removeEventListener("dragover", onDragOver);
      removeEventListener("dragleave", onDragLeave);
      removeEventListener("drop", onDrop);
    };
  });
  return isOver;
}
