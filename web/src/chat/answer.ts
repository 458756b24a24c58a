// Answers: requests them, shows them while they stream, and stores them.
import { effect, signal } from "@preact/signals";
import { apiKey } from "../api/http";
import { explain } from "../api/problems";
import { health, isRouter, refreshProps } from "../api/server";
import { toolSchemas } from "../tools/catalog";
import { FrameScheduler } from "../ui/frames";
import { lockAnswer, whenUnlocked } from "./answerLocks";
import { type Answer, generate, resume } from "./generate";
import { type KeptStream, StreamOutOfReach, stopStream } from "./keptStreams";
import { forgetOpen, noteOpen, openAnswers } from "./openAnswers";
import type { Settings } from "./settings";
import { conversations, current, followOtherTabs, newId, rereadConversation, saveMessage, saveUnfinished } from "./store";
import { announce } from "./tabs";
import { newMessage, type Thread } from "./thread";
import type { Message } from "./tree";
import { UnfinishedSaver } from "./unfinished";

export interface StreamingMessage {
  message: Message;
  progress: number | undefined;
}

/** The messages that are streaming, by id; each entry is replaced once per animation frame. */
export const streaming = signal<ReadonlyMap<string, StreamingMessage>>(new Map());
/** Error of the current conversation that belongs to no message. */
export const failure = signal("");

/** Ids of the messages that stream in this tab. */
const own = new Set<string>();

export interface AnswerOptions {
  /** The answer to continue, which follows the thread. */
  from?: Message;
  /** Present if the server has the rest of `from`: releases its lock. */
  unlock?: () => void;
  /** Place among the answers that are requested together; the first is shown. */
  index?: number;
  group?: string;
}

/** Request the answer to a thread. Returns the message that was stored. */
export async function answer(stopped: AbortSignal, thread: Thread, { from, unlock, index = 0, group }: AnswerOptions = {}): Promise<Message> {
  if (current.value?.id === thread.conversation) failure.value = "";
  const isResumed = unlock !== undefined;
  const { error: _, ending: __, stream, streamOffset = 0, ...start }: Message = from ?? newAnswer(thread, index, group);
  const kept: KeptStream = isResumed && stream ? { id: stream, read: streamOffset } : { id: newId(), read: 0 };
  if (!isResumed) delete start.toolCalls; // a continuation has its own
  let latest: Answer | null = null;
  const frames = new FrameScheduler(() => {
    if (latest) setStreaming({ message: withAnswer(start, latest), progress: latest.progress });
  });
  own.add(start.id);
  const release = unlock ?? lockAnswer(start.id);
  const saver = new UnfinishedSaver(() => unfinished(start, latest, kept));
  setStreaming({ message: start, progress: undefined });
  let ended: Message = start;
  let isOpen = false; // true if the server may still have more of it, or generate it
  try {
    if (!from) await saveMessage(unfinished(start, null, kept), { leaf: index === 0 });
    else if (!isResumed) await saveUnfinished(unfinished(start, null, kept));
    const earlier = noteOpen({ message: start.id, conversation: start.conversation, stream: kept.id });
    if (earlier) void stopStream(earlier);
    announce({ conversation: start.conversation, streaming: start });
    const onUpdate = (one: Answer) => {
      latest = one;
      frames.request();
      saver.changed();
    };
    const found = isResumed
      ? await resume(start, kept, { signal: stopped, onUpdate })
      : await generate({
          messages: from && (from.content || from.reasoning) ? [...thread.messages, from] : thread.messages,
          settings: settingsOfAnswer(thread.settings, index),
          serverTools: await toolSchemas(thread.settings.serverTools),
          kept,
          signal: stopped,
          onUpdate,
        });
    ended = withAnswer(start, found);
    isOpen = ended.ending === "aborted";
    if (isOpen) void stopStream(kept.id).then((isStopped) => isStopped && forgetOpen(start.id, kept.id));
  } catch (error) {
    const written = latest ? withAnswer(start, latest) : start;
    const action = written.content || written.reasoning ? "continue" : "regenerate";
    isOpen = error instanceof StreamOutOfReach;
    ended = { ...(isOpen ? unfinished(start, latest, kept) : { ...written, ending: "error" }), error: explain(error, action) };
  } finally {
    frames.end();
    saver.end();
    if (isRouter.value) void refreshProps(); // the request may have loaded one model and unloaded another
    const leaf = conversations.value.find((one) => one.id === ended.conversation)?.leaf;
    await saveMessage(ended, { leaf: leaf === ended.id || leaf === start.parent });
    endStreaming((one) => one.id === ended.id);
    own.delete(ended.id);
    if (!isOpen) forgetOpen(ended.id, kept.id); // after it is stored: else it would be resumed, and its tool calls run again
    release();
  }
  return ended;
}

/** Return the state of an answer for the browser's storage. */
function unfinished(start: Message, latest: Answer | null, kept: KeptStream): Message {
  const message = latest ? withAnswer(start, latest) : start;
  return { ...message, ending: "interrupted", stream: kept.id, streamOffset: kept.read };
}

/** Return true if this tab streams an answer. */
export function isStreamedHere(message: string): boolean {
  return own.has(message);
}

function newAnswer(thread: Thread, index: number, group: string | undefined): Message {
  const message = newMessage("assistant", thread, "");
  // Versions are in the order of their creation.
  return { ...message, created: message.created + index, ...(group ? { group } : {}) };
}

/** Answers to one question differ although a seed is set. */
function settingsOfAnswer(settings: Settings, index: number): Settings {
  const { seed } = settings.parameters;
  if (typeof seed !== "number" || seed < 0 || index === 0) return settings;
  return { ...settings, parameters: { ...settings.parameters, seed: seed + index } };
}

function setStreaming(one: StreamingMessage): void {
  streaming.value = new Map(streaming.value).set(one.message.id, one);
}

function endStreaming(isEnded: (message: Message) => boolean): void {
  streaming.value = new Map([...streaming.value].filter(([, { message }]) => !isEnded(message)));
}

/** Show the answers that stream in other tabs. Called once. */
export function followOtherAnswers(): void {
  followOtherTabs((conversation, message) => {
    if (message) followAnswer(message);
    else endStreaming((one) => one.conversation === conversation && !own.has(one.id));
  });
}

/** Show the state of an answer in another tab. If that tab crashes, show what is stored. */
export function followAnswer(message: Message): void {
  setStreaming({ message, progress: undefined });
  whenUnlocked(message.id, () => {
    void rereadConversation(message.conversation).then(() => endStreaming((one) => one.id === message.id && !own.has(one.id)));
    resumeLater();
  });
}

/** A tab that is reloaded goes on with its own answers if it is faster than this, else the visible tab if there is one. */
const ELSEWHERE_MS = { visible: 2000, hidden: 10_000 };

/** Resume answers of a tab that was closed or crashed. */
function resumeLater(): void {
  setTimeout(resumeIfReady, ELSEWHERE_MS[document.visibilityState]);
}

function resumeIfReady(): void {
  if (health.value.state === "ready" && openAnswers().length) void import("./resume").then(({ resumeAnswers }) => resumeAnswers());
}

/** Resume answers once the server is ready, and again whenever it was away or the user has entered a key. Called once. */
export function resumeWhenReady(): void {
  effect(() => void (apiKey.value, resumeIfReady()));
}

/** Return a message extended by an answer, or by the continuation of one. */
export function withAnswer(start: Message, answer: Answer): Message {
  const message: Message = { ...start, content: start.content + answer.content };
  const reasoning = (start.reasoning ?? "") + answer.reasoning;
  if (reasoning) message.reasoning = reasoning;
  if (answer.thoughtMs) message.thoughtMs = (start.thoughtMs ?? 0) + answer.thoughtMs;
  if (answer.toolCalls.length) message.toolCalls = answer.toolCalls.map((call) => ({ ...call }));
  if (answer.probs.length) message.probs = [...(start.probs ?? []), ...answer.probs];
  if (answer.model) message.model = answer.model;
  if (answer.stats) message.stats = answer.stats;
  if (answer.ending) message.ending = answer.ending;
  return message;
}
