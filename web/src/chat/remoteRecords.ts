// Records of the chats that this browser shares with a server: which state the server had at the last exchange, and
// whether the chat was changed here since.
import { type IDBPDatabase, openDB } from "idb";

export interface SharedChat {
  /** The chat's id. */
  id: string;
  /** The server's name for the list of chats; null: not exchanged yet. */
  owner: string | null;
  /** The server's revision at the last exchange; null: not exchanged yet. */
  revision: string | null;
  /** Marks the last change in this browser that the server does not have; null: it has all. */
  change: string | null;
}

let opened: Promise<IDBPDatabase> | undefined;

function database(): Promise<IDBPDatabase> {
  opened ??= openDB("llamado-remote", 1, { upgrade: (db) => void db.createObjectStore("chats", { keyPath: "id" }) });
  return opened;
}

export async function readRecords(): Promise<Map<string, SharedChat>> {
  const all = (await (await database()).getAll("chats")) as SharedChat[];
  return new Map(all.map((one) => [one.id, one]));
}

async function update(id: string, change: (record: SharedChat) => SharedChat | null): Promise<void> {
  const transaction = (await database()).transaction("chats", "readwrite");
  const found = ((await transaction.store.get(id)) as SharedChat | undefined) ?? { id, owner: null, revision: null, change: null };
  const changed = change(found);
  await (changed ? transaction.store.put(changed) : transaction.store.delete(id));
  await transaction.done;
}

/** Note a change in this browser. */
export function noteChange(id: string): Promise<void> {
  return update(id, (record) => ({ ...record, change: `${Date.now()} ${Math.random()}` }));
}

/** Note that browser and server have the same state, except for changes after `change`. */
export function noteExchange(id: string, owner: string, revision: string, change: string | null): Promise<void> {
  return update(id, (record) => ({ id, owner, revision, change: record.change === change ? null : record.change }));
}

export function forgetRecord(id: string): Promise<void> {
  return update(id, () => null);
}
