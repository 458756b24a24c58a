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

/** Report a change to the other tabs. */
export function announce(change: Change): void {
  channel?.postMessage(change);
}
