import { labels } from "../text";
import { chosenLanguage, LANGUAGES } from "../text/language";
import { Icon } from "../ui/Icon";

/** Selects the language of the page: an icon over a list of languages. */
export function LanguagePicker() {
  const t = labels.value.shell;
  return (
    <label class="language" title={t.language}>
      <Icon name="globe" />
      <select
        aria-label={t.language}
        value={chosenLanguage.value}
        onChange={(event) => (chosenLanguage.value = event.currentTarget.value as typeof chosenLanguage.value)}
      >
        <option value="system">{t.systemLanguage}</option>
        {Object.entries(LANGUAGES).map(([id, name]) => (
          <option key={id} value={id} lang={id}>
            {name}
          </option>
        ))}
      </select>
    </label>
  );
}
