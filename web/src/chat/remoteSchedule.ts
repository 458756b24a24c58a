// When chats are exchanged with the server: at the start, soon after changes, and regularly while the page is visible.
import { effect } from "@preact/signals";
import { ApiFailure } from "../api/http";
import { health, isKnown, props } from "../api/server";
import { synchronize } from "./remote";
import { remoteFailure } from "./remoteFailure";
import { noteChange } from "./remoteRecords";
import { followOwnChanges } from "./tabs";

const AFTER_CHANGE_MS = 1500;
const REGULAR_MS = 10_000;

let timer: ReturnType<typeof setTimeout> | undefined;
let isRunning = false;

/** Exchange chats from now on. Called once. */
export function keepSynchronized(): void {
  followOwnChanges(({ conversation, streaming }) => {
    if (isKnown.value && !props.value.chats_kept) return;
    void noteChange(conversation).catch(() => undefined);
    if (!streaming) schedule(AFTER_CHANGE_MS);
  });
  document.addEventListener("visibilitychange", () => document.hidden || schedule(0));
  effect(() => {
    if (health.value.state === "ready" && props.value.chats_kept) schedule(0);
  });
}

function schedule(milliseconds: number): void {
  clearTimeout(timer);
  timer = setTimeout(() => void run(), milliseconds);
}

async function run(): Promise<void> {
  if (!props.value.chats_kept || document.hidden) return;
  if (!isRunning) {
    isRunning = true;
    await inOneTab(synchronize).catch((error: unknown) => {
      // Without the server, the page says so elsewhere; changes are exchanged when it is back.
      remoteFailure.value = error instanceof ApiFailure && error.status === 0 ? "" : String((error as Error).message);
    });
    isRunning = false;
  }
  schedule(REGULAR_MS);
}

/** Run work unless another tab is running it. Browsers without locks (pages over plain HTTP) run it in each tab. */
async function inOneTab(work: () => Promise<void>): Promise<void> {
  const locks = navigator.locks as LockManager | undefined;
  await (locks ? locks.request("llamado-chats", { ifAvailable: true }, (lock) => (lock ? work() : undefined)) : work());
}
