// Attachments of waiting messages, in a database of the browser, so that they survive a reload.
import { type IDBPDatabase, openDB } from "idb";
import type { Attachment } from "./tree";

let opened: Promise<IDBPDatabase> | undefined;

function database(): Promise<IDBPDatabase> {
  opened ??= openDB("llamado-queue", 1, { upgrade: (db) => void db.createObjectStore("files") });
  return opened;
}

/** Store the attachments of a message. If the browser's storage is full, they are lost with the page. */
export async function storeFiles(message: string, files: readonly Attachment[]): Promise<void> {
  await (await database()).put("files", files, message).catch(() => undefined);
}

export async function readFiles(message: string): Promise<Attachment[]> {
  return ((await (await database()).get("files", message)) as Attachment[] | undefined) ?? [];
}

export async function deleteFiles(message: string): Promise<void> {
  await (await database()).delete("files", message);
}
