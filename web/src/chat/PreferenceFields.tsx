import { labels } from "../text";
import { useDraft } from "../ui/draft";
import { changePreferences, preferences } from "./preferences";

const MAX_ANSWERS = 4;

/** Preferences for all chats. */
export function PreferenceFields() {
  const t = labels.value.preferences;
  const { answers, pasteLimit, titles } = preferences.value;
  const limit = useDraft(pasteLimit, (text) => changePreferences({ pasteLimit: Math.max(0, Math.trunc(Number(text) || 0)) }));
  return (
    <details class="preferences">
      <summary>{t.title}</summary>
      <label>
        {t.answers}
        <select value={answers} onChange={(event) => changePreferences({ answers: Number(event.currentTarget.value) })}>
          {Array.from({ length: MAX_ANSWERS }, (_, index) => (
            <option key={index} value={index + 1}>
              {index + 1}
            </option>
          ))}
        </select>
      </label>
      <label>
        {t.pasteLimit}
        <input type="number" min={0} step={100} {...limit} />
      </label>
      <label class="check">
        <input type="checkbox" checked={titles} onChange={(event) => changePreferences({ titles: event.currentTarget.checked })} />
        {t.titles}
      </label>
    </details>
  );
}
