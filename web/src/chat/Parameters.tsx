import { signal } from "@preact/signals";
import type { ComponentChildren } from "preact";
import { useId, useState } from "preact/hooks";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { ParameterField } from "./ParameterField";
import { commonParameters, describe, FOLDED_GROUPS, type FoldedGroup, type Parameter } from "./parameters";

interface Props {
  all: Parameter[];
  /** Reason why the parameters could not be loaded; "" if they are loaded or loading. */
  readError: string;
  values: Record<string, unknown>;
  onChange: (name: string, value: unknown) => void;
  onReset: () => void;
  /** Shown below the common parameters. */
  children: ComponentChildren;
  /** Other advanced settings, by label. */
  advanced: Record<string, ComponentChildren>;
}

/** Groups that the user unfolded. */
const unfolded = signal<readonly FoldedGroup[]>([]);

function remember(group: FoldedGroup, isOpen: boolean): void {
  const others = unfolded.value.filter((one) => one !== group);
  unfolded.value = isOpen ? [...others, group] : others;
}

/** The server's parameters: the common ones first, all others folded, with a filter for names and descriptions. */
export function Parameters({ all, readError, values, onChange, onReset, children, advanced }: Props) {
  const t = labels.value.settings;
  const id = useId();
  const [text, setText] = useState("");
  const query = text.trim().toLowerCase();
  const isFound = (words: string) => words.toLowerCase().includes(query);
  const found = all.filter((one) => isFound(`${one.name} ${describe(one)}`));
  const others = Object.entries(advanced).filter(([label]) => isFound(label));
  const changed = Object.keys(values).length;
  const field = (one: Parameter) => (
    <ParameterField key={one.name} id={`${id}-${one.name}`} parameter={one} value={values[one.name]} onChange={(value) => onChange(one.name, value)} />
  );
  return (
    <section class="parameters" aria-label={t.parameters}>
      {!all.length && <p class="hint">{readError || labels.value.common.loading}</p>}
      <div class="common">{commonParameters(all).map(field)}</div>
      {children}
      <div class="row">
        <input type="search" placeholder={t.find} aria-label={t.find} value={text} onInput={(event) => setText(event.currentTarget.value)} />
        {changed > 0 && (
          <button class="quiet small" type="button" onClick={onReset}>
            <Icon name="again" /> {t.reset}
          </button>
        )}
      </div>
      {!found.length && !others.length && <p class="hint">{t.noneFound}</p>}
      {FOLDED_GROUPS.map((group) => {
        const here = found.filter((one) => one.group === group);
        const isAdvanced = group === "advanced" && others.length > 0;
        const changedHere = here.filter((one) => one.name in values).length;
        return here.length || isAdvanced ? (
          <details key={group} open={query !== "" || unfolded.value.includes(group)} onToggle={(event) => query || remember(group, event.currentTarget.open)}>
            <summary>
              {t.groups[group]} {changedHere > 0 && <span class="count">{t.changed(changedHere)}</span>}
            </summary>
            {isAdvanced && (
              <div class="others">
                {others.map(([label, setting]) => (
                  <div key={label}>{setting}</div>
                ))}
              </div>
            )}
            {here.map(field)}
          </details>
        ) : null;
      })}
    </section>
  );
}
