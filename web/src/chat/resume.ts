// Answers that a reload, a crash, a closed tab or a long outage left: the page goes on with them.
import { claimAnswer } from "./answerLocks";
import { answer, followAnswer, isStreamedHere, streaming } from "./answer";
import { answerWithTools } from "./callTools";
import { stopStream } from "./keptStreams";
import { forgetOpen, type OpenAnswer, openAnswers } from "./openAnswers";
import { conversations, messagesOf, readConversations, settingsOf, whenLoaded } from "./store";
import { runTask } from "./tasks";
import { path } from "./tree";

/** Resume the answers that no tab streams. Those that the server does not have stay interrupted. */
export async function resumeAnswers(): Promise<void> {
  const left = openAnswers().filter(({ message }) => !isStreamedHere(message));
  if (!left.length) return;
  await Promise.all([readConversations(), whenLoaded()]);
  await Promise.all(left.map(resumeOne));
}

async function resumeOne({ message: id, conversation, stream }: OpenAnswer): Promise<void> {
  const unlock = await claimAnswer(id);
  if (!unlock) {
    const message = (await messagesOf(conversation)).find((one) => one.id === id);
    if (message && !streaming.value.has(id)) followAnswer(message);
    return;
  }
  try {
    const all = new Map((await messagesOf(conversation)).map((one) => [one.id, one]));
    if (isStreamedHere(id)) return;
    const message = all.get(id);
    const found = conversations.value.find((one) => one.id === conversation);
    if (!found || message?.ending !== "interrupted" || message.stream !== stream) {
      // The user has stopped or deleted it, or another tab or device has written it again.
      if (await stopStream(stream)) forgetOpen(id, stream);
      return;
    }
    const thread = { conversation, settings: settingsOf(found), messages: path(all, message.parent) };
    const run = message.group ? answer : answerWithTools; // of several answers the user chooses one
    await runTask(async (stopped) => void (await run(stopped, thread, { from: message, unlock })), conversation);
  } finally {
    unlock();
  }
}
