// Titles of new chats, written by the model while it is idle.
import { getJson, postJson } from "../api/http";
import { isBaseModel, isModelLoaded, modelFor } from "../api/server";
import { labels } from "../text";
import { chatMessages } from "./generate";
import { preferences } from "./preferences";
import { requestFields } from "./settings";
import { changeConversation, conversations, TITLE_LENGTH, titleOf } from "./store";
import { isAnyBusy, onBusy, onIdle } from "./tasks";
import { type Thread, threadOf } from "./thread";

const MAX_TOKENS = 24;
const ATTEMPTS = 10;
const PAUSE_MS = 1000;

let running: AbortController | undefined;

/** Wait until no request runs or waits on the server. Return false if that takes too long. */
async function waitForIdleServer(signal: AbortSignal): Promise<boolean> {
  for (let attempt = 0; attempt < ATTEMPTS && !signal.aborted; attempt++) {
    const counts = await getJson<{ running: number; waiting: number }>("live/requests", signal);
    if (counts.running === 0 && counts.waiting === 0) return true;
    await new Promise((done) => setTimeout(done, PAUSE_MS));
  }
  return false;
}

/** Return the title in an answer of the model; "" if there is none. */
export function cleanTitle(answer: string): string {
  const line = answer.replace(/<think>.*?<\/think>/s, "").replace(/\*\*|__|`/g, "").trim().split("\n")[0] ?? "";
  const title = line.replace(/^(#+\s|title:\s*|["'“„«])+|(["'”“»]|[.\s])+$/gi, "").trim();
  return title.length > TITLE_LENGTH ? "" : title;
}

/** Ask the model for a title. The chat comes first, so that the server's prompt cache has most of the prompt. */
async function askForTitle({ settings, messages }: Thread, signal: AbortSignal): Promise<string> {
  const { parameters, ...others } = settings;
  const body = {
    ...requestFields({ ...others, parameters: {}, schema: "", tools: "", probs: 0 }),
    messages: [...(await chatMessages(settings, messages)), { role: "user", content: labels.value.chat.titleRequest }],
    max_tokens: MAX_TOKENS,
    temperature: 0,
    chat_template_kwargs: { ...(parameters["chat_template_kwargs"] as object | undefined), enable_thinking: false },
  };
  const found = await postJson<{ choices?: { message?: { content?: string | null } }[] }>("v1/chat/completions", body, signal);
  return cleanTitle(found.choices?.[0]?.message?.content ?? "");
}

/** Name a conversation after its first answer, unless the user named it or asks something meanwhile. */
async function nameConversation(id: string): Promise<void> {
  const thread = preferences.value.titles && !isBaseModel.value ? await threadOf(id) : null;
  if (thread?.messages.length !== 2) return;
  const [question, answer] = thread.messages;
  const isUnnamed = () => conversations.value.find((one) => one.id === id)?.title === titleOf(question!.content);
  if (answer!.ending !== "stop" || !isUnnamed() || !isModelLoaded(modelFor(thread.settings.model))) return;
  const mine = new AbortController();
  running = mine;
  try {
    if (!(await waitForIdleServer(mine.signal)) || isAnyBusy.value) return;
    const title = await askForTitle(thread, mine.signal);
    const conversation = conversations.value.find((one) => one.id === id);
    if (title && conversation && isUnnamed()) await changeConversation(conversation, { title });
  } catch {
    // the first words of the question stay
  }
}

/** Name new chats from now on. Called once. */
export function nameNewChats(): void {
  onIdle((conversation) => void nameConversation(conversation));
  onBusy(() => running?.abort());
}
