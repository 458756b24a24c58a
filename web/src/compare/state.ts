// State of a comparison: one question to two sides; each side continues from its own answers.
import { signal } from "@preact/signals";
import { explain } from "../api/problems";
import { type Answer, generate } from "../chat/generate";
import { NO_SETTINGS, type Settings } from "../chat/settings";
import { newId } from "../chat/store";
import type { Attachment, Message } from "../chat/tree";
import { withAnswer } from "../chat/answer";
import { toolSchemas } from "../tools/catalog";
import { FrameScheduler } from "../ui/frames";
import { persistentSignal } from "../ui/persistent";

export type Side = 0 | 1;
export const SIDES: readonly Side[] = [0, 1];

export interface Turn {
  question: Message;
  answers: readonly [Message, Message];
}

/** Settings of each side. */
export const settings = persistentSignal<[Settings, Settings]>("compare", [NO_SETTINGS, NO_SETTINGS]);
export const turns = signal<readonly Turn[]>([]);
/** Sides whose answers are streaming. */
export const streaming = signal<readonly Side[]>([]);

let running: AbortController | null = null;

export function sideSettings(side: Side): Settings {
  return { ...NO_SETTINGS, ...settings.value[side] };
}

export function changeSide(side: Side, changes: Partial<Settings>): void {
  const [one, other] = [sideSettings(0), sideSettings(1)];
  settings.value = side === 0 ? [{ ...one, ...changes }, other] : [one, { ...other, ...changes }];
}

export function stop(): void {
  running?.abort();
}

export function clear(): void {
  stop();
  turns.value = [];
}

function message(role: Message["role"], content: string): Message {
  return { id: newId(), conversation: "", parent: null, role, content, created: Date.now() };
}

export async function ask(content: string, attachments: Attachment[]): Promise<void> {
  if (streaming.value.length) return;
  const question = { ...message("user", content), ...(attachments.length ? { attachments } : {}) };
  const before = turns.value;
  const turn: Turn = { question, answers: [message("assistant", ""), message("assistant", "")] };
  turns.value = [...before, turn];
  streaming.value = SIDES;
  const mine = new AbortController();
  running = mine;
  await Promise.all(SIDES.map((side) => answer(side, before, turn, mine.signal)));
  if (running === mine) running = null;
}

/** Replace one side's answer. */
function setAnswer(turn: Turn, side: Side, answer: Message): void {
  turns.value = turns.value.map((one) => {
    if (one.question.id !== turn.question.id) return one;
    const [left, right] = one.answers;
    return { ...one, answers: side === 0 ? [answer, right] : [left, answer] };
  });
}

async function answer(side: Side, before: readonly Turn[], turn: Turn, signal: AbortSignal): Promise<void> {
  const start = turn.answers[side];
  const messages = [...before.flatMap((one) => [one.question, one.answers[side]]), turn.question];
  let latest: Answer | null = null;
  const frames = new FrameScheduler(() => {
    if (latest) setAnswer(turn, side, withAnswer(start, latest));
  });
  let ended = start;
  try {
    const chosen = sideSettings(side);
    const found = await generate({
      messages,
      settings: chosen,
      serverTools: await toolSchemas(chosen.serverTools),
      signal,
      onUpdate: (one) => {
        latest = one;
        frames.request();
      },
    });
    ended = withAnswer(start, found);
  } catch (error) {
    ended = { ...(latest ? withAnswer(start, latest) : start), ending: "error", error: explain(error, "ask") };
  } finally {
    frames.end();
    setAnswer(turn, side, ended);
    streaming.value = streaming.value.filter((one) => one !== side);
  }
}
