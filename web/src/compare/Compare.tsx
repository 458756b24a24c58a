// The compare view: one question to two models, or to one model with two settings.
import { signal } from "@preact/signals";
import { memo } from "preact/compat";
import { useEffect, useRef, useState } from "preact/hooks";
import { isRouter, modelFor, props } from "../api/server";
import { Composer } from "../chat/Composer";
import { ModelPicker } from "../chat/ModelPicker";
import { Probabilities } from "../chat/Probabilities";
import { SettingsPanel } from "../chat/SettingsPanel";
import { Reasoning } from "../chat/Reasoning";
import { AnswerStats } from "../chat/AnswerStats";
import { Waiting } from "../chat/Waiting";
import type { Message } from "../chat/tree";
import { Markdown } from "../markdown/Markdown";
import { displayText } from "../markdown/displayText";
import { MediaRow, PictureDialog } from "../media/MediaView";
import { labels } from "../text";
import { readServerTools } from "../tools/catalog";
import { Icon } from "../ui/Icon";
import { persistentSignal } from "../ui/persistent";
import { ask, changeSide, clear, streaming, type Side, SIDES, sideSettings, stop, turns } from "./state";
import { mark, unmark } from "./marks";
import "../chat/chat.css";
import "./compare.css";

const NEAR_END = 60; // pixels
const openSide = signal<Side | null>(null);
const marking = persistentSignal("compare.marks", true);

export function Compare() {
  const t = labels.value.compare;
  const list = useRef<HTMLDivElement>(null);
  const [differing, setDiffering] = useState<{ differ: number; of: number } | null>(null);
  const busy = streaming.value.length > 0;
  const isMarking = marking.value;
  const all = turns.value;
  useEffect(() => void readServerTools(), [props.value]);
  const isFollowing = useRef(true);
  useEffect(() => {
    isFollowing.current = true;
  }, [all.length]);
  useEffect(() => {
    const place = list.current;
    if (place && isFollowing.current) place.scrollTop = place.scrollHeight;
  }, [all]);
  useEffect(() => {
    if (busy || !isMarking || !all.length) {
      unmark();
      setDiffering(null);
      return;
    }
    const pairs = Array.from(list.current!.querySelectorAll(".compared"), (row) => {
      const [left, right] = row.querySelectorAll(".markdown, .plain");
      return left && right ? ([left, right] as const) : [];
    }).filter((pair) => pair.length === 2) as [Element, Element][];
    setDiffering(mark(pairs));
    return unmark;
  }, [busy, isMarking, all]);

  function scrolled({ currentTarget: { scrollHeight, scrollTop, clientHeight } }: { currentTarget: HTMLElement }) {
    isFollowing.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  return (
    <div class={`compare ${openSide.value === null ? "" : "shows-settings"}`}>
      <section class="conversation" aria-label={t.comparison}>
        <div class="chat-bar">
          <h1>{t.title}</h1>
          <label class="check">
            <input type="checkbox" checked={isMarking} onChange={(event) => (marking.value = event.currentTarget.checked)} />
            {t.highlight}
          </label>
          <span role="status" class="summary">
            {differing && (differing.differ ? t.differ(differing.differ, differing.of) : t.same)}
          </span>
          <button class="quiet" type="button" disabled={!all.length} onClick={clear}>
            {t.clear}
          </button>
        </div>
        <div class="compare-heads">
          {SIDES.map((side) => (
            <SideHeader key={side} side={side} />
          ))}
        </div>
        <div ref={list} class="compare-turns" role="log" aria-label={t.answers} aria-busy={busy} tabIndex={0} onScroll={scrolled}>
          {!all.length && (
            <div class="welcome">
              <h2>{t.question}</h2>
              <p>{isRouter.value ? t.hintRouter : t.hint}</p>
            </div>
          )}
          {all.map(({ question, answers }) => (
            <section key={question.id} class="turn">
              <article class="message user" aria-label={labels.value.common.you}>
                <MediaRow attachments={question.attachments} />
                <div class="message-text" dir="auto">
                  {displayText(question.content)}
                </div>
              </article>
              <div class="compared">
                {SIDES.map((side) => (
                  <AnswerView
                    key={side}
                    side={side}
                    message={answers[side]}
                    isStreaming={streaming.value.includes(side) && question === all.at(-1)!.question}
                  />
                ))}
              </div>
            </section>
          ))}
        </div>
        <Composer
          place="compare"
          busy={busy}
          onStop={stop}
          onSend={ask}
          models={SIDES.map((side) => modelFor(sideSettings(side).model))}
        />
        <PictureDialog />
      </section>
      {openSide.value !== null && (
        <SettingsPanel
          key={openSide.value}
          title={t.sideTitles[openSide.value]}
          settings={sideSettings(openSide.value)}
          onChange={(changes) => changeSide(openSide.value!, changes)}
          onClose={() => (openSide.value = null)}
        />
      )}
    </div>
  );
}

/** Model and settings of one side, in a line. */
function SideHeader({ side }: { side: Side }) {
  const t = labels.value.compare;
  const { model, system, parameters, schema } = sideSettings(side);
  const facts = [
    isRouter.value ? "" : (props.value.model_alias ?? ""),
    ...Object.entries(parameters).map(([name, value]) => `${name} ${JSON.stringify(value)}`),
    system.trim() && t.systemPrompt,
    schema.trim() && t.schema,
  ].filter(Boolean);
  return (
    <div class="compare-head">
      <b class="side">{t.sides[side]}</b>
      <ModelPicker label={t.sideModels[side]} chosen={model} onChoose={(one) => changeSide(side, { model: one })} />
      <span class="what">{displayText(facts.join(" · "))}</span>
      <button
        class="quiet small"
        type="button"
        aria-label={t.sideSettings[side]}
        aria-expanded={openSide.value === side}
        onClick={() => (openSide.value = openSide.value === side ? null : side)}
      >
        <Icon name="sliders" /> {labels.value.common.settings}
      </button>
    </div>
  );
}

const AnswerView = memo(({ side, message, isStreaming }: { side: Side; message: Message; isStreaming: boolean }) => {
  const t = labels.value.compare;
  const [probs, setProbs] = useState(false);
  return (
    <article class="message assistant" aria-label={t.sideAnswers[side]}>
      <Reasoning message={message} isStreaming={isStreaming} />
      {probs && message.probs ? <Probabilities tokens={message.probs} /> : <Markdown text={message.content} isComplete={!isStreaming} />}
      {message.toolCalls?.map((call) => (
        <pre key={call.id} class="tool-call">
          {displayText(`${call.name} ${call.arguments}`)}
        </pre>
      ))}
      {isStreaming && !message.content && !message.reasoning && (
        <Waiting progress={undefined} model={modelFor(sideSettings(side).model)} />
      )}
      {message.error && <p class="notice">{displayText(message.error)}</p>}
      {!isStreaming && message.ending === "interrupted" && <p class="ending">{t.interrupted}</p>}
      <footer class="message-foot">
        {message.probs && (
          <button class="quiet small" type="button" aria-pressed={probs} onClick={() => setProbs(!probs)}>
            {labels.value.common.probabilities}
          </button>
        )}
        {message.stats && <AnswerStats stats={message.stats} isStreaming={isStreaming} />}
      </footer>
    </article>
  );
});
