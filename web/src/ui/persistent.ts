// Signals whose values survive a reload.
import { effect, signal, type Signal } from "@preact/signals";

/** Return a signal that is stored in the browser under a name, as JSON. An unreadable value becomes the initial one. */
export function persistentSignal<T>(name: string, initial: T): Signal<T> {
  const key = `llamado.${name}`;
  let value = initial;
  try {
    const kept = localStorage.getItem(key);
    if (kept !== null) value = JSON.parse(kept) as T;
  } catch {
    // storage is disabled, or holds a value of another program
  }
  const found = signal(value);
  effect(() => {
    const text = JSON.stringify(found.value);
    try {
      localStorage.setItem(key, text);
    } catch {
      // the value is lost with the page
    }
  });
  return found;
}
