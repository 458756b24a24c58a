// Other tabs of this page, which show each change of a chat too.
import type { Message } from "./tree";

export interface Change {
  conversation: string;
  /** The state of an answer that is streaming; nothing is streaming otherwise. */
  streaming?: Message;
}

let channel: BroadcastChannel | undefined;

/** Call `handle` for each change in another tab. Called once. */
export function followTabs(handle: (change: Change) => void): void {
  channel = new BroadcastChannel("llamado");
  channel.onmessage = ({ data }) => handle(data as Change);
}

let followOwn: (change: Change) => void = () => undefined;

/** Call `handle` for each change in this tab. Called once. */
export function followOwnChanges(handle: (change: Change) => void): void {
  followOwn = handle;
}

/** Report a change of this tab. */
export function announce(change: Change): void {
  followOwn(change);
  announceToTabs(change);
}

/** Report a change that another device made to the other tabs. */
export function announceToTabs(change: Change): void {
  channel?.postMessage(change);
}
