// The chats that the server keeps (`--chats`). Changes are conditional on the revision that this browser knows.
import { getJson, send } from "../api/http";

export interface RemoteList {
  /** Name of the list: each API key has its own. */
  owner: string;
  chats: { id: string; revision: string; updated: number; bytes: number }[];
  /** Ids of chats that a device deleted. */
  deleted: string[];
}

/** Revision of a chat whose file on the server is damaged. */
export const DAMAGED = "damaged";

function known(revision: string | null): Record<string, string> {
  return revision === null ? { "If-None-Match": "*" } : { "If-Match": `"${revision}"` };
}

export function listChats(): Promise<RemoteList> {
  return getJson<RemoteList>("chats");
}

export async function getChat(id: string): Promise<{ chat: unknown; revision: string }> {
  const response = await send("GET", `chats/${id}`);
  return { chat: await response.json(), revision: (response.headers.get("ETag") ?? "").replaceAll('"', "") };
}

/** Store a chat in place of a revision; null: as a new one. Return its revision. Throws ApiFailure 412 after a missed change. */
export async function putChat(id: string, chat: unknown, revision: string | null): Promise<string> {
  const response = await send("PUT", `chats/${id}`, { body: chat, headers: known(revision) });
  return ((await response.json()) as { revision: string }).revision;
}

export async function deleteChat(id: string, revision: string): Promise<void> {
  await send("DELETE", `chats/${id}`, { headers: known(revision) });
}
