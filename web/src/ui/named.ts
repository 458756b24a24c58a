// Lists of things that the user saved under a name, such as presets.

export interface Named {
  name: string;
}

/** Return the list without `name`. */
export function withoutName<T extends Named>(all: readonly T[], name: string): T[] {
  return all.filter((one) => one.name !== name);
}

/** Return the list in the order of the names, with a thing in the place of one with the same name. */
export function withNamed<T extends Named>(all: readonly T[], added: T): T[] {
  return [...withoutName(all, added.name), added].sort((a, b) => a.name.localeCompare(b.name));
}
