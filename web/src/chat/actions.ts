// User actions in a conversation: send, edit, regenerate, continue, switch versions.
import { navigate } from "../shell/route";
import { answerQuestion, answerWithTools } from "./callTools";
import { enqueue, type QueuedMessage, nextQueued, takeQueued } from "./queue";
import { children, createConversation, current, saveMessage, shownPath, shownSettings, updateConversation, whenLoaded } from "./store";
import { busy, isBusy, onIdle, runTask, setConversation } from "./tasks";
import { newMessage, type Thread, threadOf, threadTo, withMessage } from "./thread";
import { type Attachment, type Message, newestLeaf } from "./tree";

/** Append a user message to the current branch and request its answer. While an answer streams, the message waits. */
export async function send(content: string, attachments: Attachment[]): Promise<void> {
  if (busy.value) {
    if (current.value) enqueue(current.value.id, content, attachments);
    return;
  }
  await runTask(async (stopped, task) => {
    await whenLoaded();
    let created: Promise<void> | undefined;
    if (!current.value) {
      created = createConversation(content || attachments[0]?.name || "", shownSettings());
      navigate("chat", current.value!.id);
    }
    setConversation(task, current.value!.id);
    const thread = threadTo(shownPath.value.at(-1)?.id ?? null);
    await created;
    await ask(stopped, thread, content, attachments);
  });
}

/** Send a message that waited, in its own conversation. */
export async function sendQueued({ id, conversation }: QueuedMessage): Promise<void> {
  if (isBusy(conversation)) return;
  await runTask(async (stopped) => {
    const thread = await threadOf(conversation);
    const message = await takeQueued(id);
    if (thread && message) await ask(stopped, thread, message.text, message.attachments);
  }, conversation);
}

// The next message follows a complete answer. After Stop, an error or a tool call the user decides.
onIdle(async (conversation) => {
  const next = nextQueued(conversation);
  const last = next && (await threadOf(conversation))?.messages.at(-1);
  if (last?.role === "assistant" && (last.ending === "stop" || last.ending === "length")) await sendQueued(next!);
});

/** Add another version of a user message and request its answer. */
export async function resend(message: Message, content: string): Promise<void> {
  if (!busy.value) await runTask((stopped) => ask(stopped, threadTo(message.parent), content, message.attachments ?? []));
}

async function ask(stopped: AbortSignal, thread: Thread, content: string, attachments: Attachment[]): Promise<void> {
  const message = { ...newMessage("user", thread, content), ...(attachments.length ? { attachments } : {}) };
  await saveMessage(message);
  await answerQuestion(stopped, withMessage(thread, message));
}

/** Add another version of an answer. */
export async function regenerate(message: Message): Promise<void> {
  if (!busy.value) await runTask((stopped) => answerWithTools(stopped, threadTo(message.parent)));
}

/** Continue an answer that has ended. */
export async function continueAnswer(message: Message): Promise<void> {
  if (!busy.value) await runTask((stopped) => answerWithTools(stopped, threadTo(message.parent), { from: message }));
}

/** Show a version of a message. */
export async function showVersion(message: Message): Promise<void> {
  await updateConversation({ leaf: newestLeaf(children.value, message.id) });
}

/** Go on with one of several answers. The others stay as versions. */
export async function chooseAnswer(chosen: Message, answers: readonly Message[]): Promise<void> {
  for (const { group: _, ...message } of answers) await saveMessage(message, { leaf: message.id === chosen.id });
}
