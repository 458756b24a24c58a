// Answers that a reload, a crash or a closed tab left: the page goes on with those whose streams the server has.
import { effect } from "@preact/signals";
import { apiKey } from "../api/http";
import { health } from "../api/server";
import { claimAnswer } from "./answerLocks";
import { answer, isStreamedHere } from "./answer";
import { answerWithTools } from "./callTools";
import { findStreams, stopStream } from "./keptStreams";
import { forgetOpen, openAnswers } from "./openAnswers";
import { conversations, messagesOf, readConversations, settingsOf, whenLoaded } from "./store";
import { runTask } from "./tasks";
import { path } from "./tree";

/** Resume answers once the server is ready, and again whenever it was away or the user has entered a key. */
export function resumeWhenReady(): void {
  effect(() => {
    if (health.value.state === "ready" && apiKey.value !== null) void resumeAnswers();
  });
}

/** Resume the answers that no tab streams. Those that the server does not have stay interrupted. */
export async function resumeAnswers(): Promise<void> {
  const left = openAnswers().filter(({ message }) => !isStreamedHere(message));
  if (!left.length) return;
  const kept = await findStreams(left.map(({ message }) => message)).catch(() => null);
  if (!kept) return; // the server was not ready
  await Promise.all([readConversations(), whenLoaded()]);
  await Promise.all(left.map(({ message, conversation }) => resumeOne(message, conversation, kept.has(message))));
}

async function resumeOne(id: string, conversation: string, isKept: boolean): Promise<void> {
  const unlock = await claimAnswer(id);
  if (!unlock) return;
  const all = new Map((await messagesOf(conversation)).map((one) => [one.id, one]));
  const message = all.get(id);
  const found = conversations.value.find((one) => one.id === conversation);
  if (!isKept || !found || message?.ending !== "interrupted" || isStreamedHere(id)) {
    if (isKept && !message) void stopStream(id); // it was deleted
    if (!isStreamedHere(id)) forgetOpen(id);
    unlock();
    return;
  }
  const thread = { conversation, settings: settingsOf(found), messages: path(all, message.parent) };
  const run = message.group ? answer : answerWithTools; // of several answers the user chooses one
  await runTask(async (stopped) => void (await run(stopped, thread, { from: message, unlock })), conversation);
}
