import { labels } from "../text";
import { useDraft } from "../ui/draft";

/** A field for JSON that shows parse errors while the user types. */
export function JsonField({ label, placeholder, value, onChange }: { label: string; placeholder: string; value: string; onChange: (text: string) => void }) {
  const draft = useDraft(value, onChange);
  const wrong = jsonError(String(draft.value));
  return (
    <label>
      {label}
      <textarea rows={2} class="mono" spellcheck={false} placeholder={placeholder} aria-invalid={wrong !== ""} {...draft} />
      {wrong && <small class="wrong">{wrong}</small>}
    </label>
  );
}

function jsonError(text: string): string {
  if (!text.trim()) return "";
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return labels.value.settings.invalidJson((error as Error).message);
  }
}
