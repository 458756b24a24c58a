// Signals whose values outlive the page.
import { effect, signal, type Signal } from "@preact/signals";

/** A signal kept in the browser under a name. Values are JSON; one that cannot be read is the initial one. */
export function remembered<T>(name: string, initial: T): Signal<T> {
  const key = `llamado.${name}`;
  let value = initial;
  try {
    const kept = localStorage.getItem(key);
    if (kept !== null) value = JSON.parse(kept) as T;
  } catch {
    // a browser that keeps nothing, or something that is not ours
  }
  const found = signal(value);
  effect(() => {
    const text = JSON.stringify(found.value);
    try {
      localStorage.setItem(key, text);
    } catch {
      // it is forgotten with the page
    }
  });
  return found;
}
