// One question to two sides at once; each side goes on from its own answers.
import { signal } from "@preact/signals";
import { explain } from "../api/problems";
import { type Answer, generate } from "../chat/generate";
import { NO_SETTINGS, type Settings } from "../chat/settings";
import { newId } from "../chat/store";
import type { Attachment, Message } from "../chat/tree";
import { grown } from "../chat/answering";
import { offered } from "../tools/offered";
import { Pictures } from "../ui/pictures";
import { remembered } from "../ui/remembered";

export type Side = 0 | 1;
export const SIDES: readonly Side[] = [0, 1];

export interface Turn {
  question: Message;
  answers: readonly [Message, Message];
}

/** What each side asks of the model. */
export const settings = remembered<[Settings, Settings]>("compare", [NO_SETTINGS, NO_SETTINGS]);
export const turns = signal<readonly Turn[]>([]);
/** Which sides' answers are being made. */
export const growing = signal<readonly Side[]>([]);

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
  if (growing.value.length) return;
  const question = { ...message("user", content), ...(attachments.length ? { attachments } : {}) };
  const before = turns.value;
  const turn: Turn = { question, answers: [message("assistant", ""), message("assistant", "")] };
  turns.value = [...before, turn];
  growing.value = SIDES;
  const mine = new AbortController();
  running = mine;
  await Promise.all(SIDES.map((side) => answer(side, before, turn, mine.signal)));
  if (running === mine) running = null;
}

/** Puts a new picture of one side's answer in place of the one before. */
function put(turn: Turn, side: Side, answer: Message): void {
  turns.value = turns.value.map((one) => {
    if (one.question.id !== turn.question.id) return one;
    const [left, right] = one.answers;
    return { ...one, answers: side === 0 ? [answer, right] : [left, answer] };
  });
}

async function answer(side: Side, before: readonly Turn[], turn: Turn, signal: AbortSignal): Promise<void> {
  const start = turn.answers[side];
  const asked = [...before.flatMap((one) => [one.question, one.answers[side]]), turn.question];
  let latest: Answer | null = null;
  const pictures = new Pictures(() => {
    if (latest) put(turn, side, grown(start, latest));
  });
  let ended = start;
  try {
    const given = sideSettings(side);
    const found = await generate({
      messages: asked,
      settings: given,
      serverTools: await offered(given.serverTools),
      signal,
      onGrown: (one) => {
        latest = one;
        pictures.want();
      },
    });
    ended = grown(start, found);
  } catch (error) {
    ended = { ...(latest ? grown(start, latest) : start), ending: "error", error: explain(error, "ask again") };
  } finally {
    pictures.end();
    put(turn, side, ended);
    growing.value = growing.value.filter((one) => one !== side);
  }
}
