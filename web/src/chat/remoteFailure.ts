// The state of the exchange with a server that keeps the chats.
import { signal } from "@preact/signals";

/** Why chats were not exchanged at the last attempt; "" if all were, or if the server cannot be reached. */
export const remoteFailure = signal("");
