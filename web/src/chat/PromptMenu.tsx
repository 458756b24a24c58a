import { labels } from "../text";
import { Lazy } from "../ui/Lazy";
import { Menu } from "../ui/Menu";
import { prependDraft } from "./drafts";
import { isLibraryOpen, prompts } from "./prompts";

const loadLibrary = async () => (await import("./PromptLibrary")).PromptLibrary;

/** Inserts a saved prompt into the draft, or opens the library. */
export function PromptMenu({ place }: { place: string }) {
  const t = labels.value.prompts;
  const saved = prompts.value.map((one) => ({ icon: "file" as const, label: one.name, run: () => prependDraft(place, one.text) }));
  return (
    <>
      <Menu icon="book" label={t.title} items={[...saved, { icon: "pencil", label: t.manage, run: () => (isLibraryOpen.value = true) }]} />
      {isLibraryOpen.value && <Lazy load={loadLibrary} />}
    </>
  );
}
