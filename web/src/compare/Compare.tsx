// Two models, or two settings of one, asked the same at the same time.
import { signal } from "@preact/signals";
import { memo } from "preact/compat";
import { useEffect, useRef, useState } from "preact/hooks";
import { isRouter, props } from "../api/server";
import { Composer } from "../chat/Composer";
import { ModelPicker } from "../chat/ModelPicker";
import { Probabilities } from "../chat/Probabilities";
import { SettingsPanel } from "../chat/SettingsPanel";
import { Thoughts } from "../chat/Thoughts";
import { Took } from "../chat/Took";
import type { Message } from "../chat/tree";
import { Markdown } from "../markdown/Markdown";
import { shown } from "../markdown/visible";
import { readServerTools } from "../tools/offered";
import { Icon } from "../ui/Icon";
import { remembered } from "../ui/remembered";
import { ask, changeSide, clear, growing, type Side, SIDES, sideSettings, stop, turns } from "./comparing";
import { mark, unmark } from "./marks";
import "../chat/chat.css";
import "./compare.css";

const NAMES = ["Left", "Right"] as const;
const NEAR_END = 60; // pixels
const opened = signal<Side | null>(null);
const marking = remembered("compare.marks", true);

export function Compare() {
  const list = useRef<HTMLDivElement>(null);
  const [told, setTold] = useState("");
  const busy = growing.value.length > 0;
  const wanted = marking.value;
  const all = turns.value;
  useEffect(() => void readServerTools(), [props.value]);
  const follows = useRef(true);
  useEffect(() => {
    follows.current = true;
  }, [all.length]);
  useEffect(() => {
    const place = list.current;
    if (place && follows.current) place.scrollTop = place.scrollHeight;
  }, [all]);
  useEffect(() => {
    if (busy || !wanted || !all.length) {
      unmark();
      setTold("");
      return;
    }
    const pairs = Array.from(list.current!.querySelectorAll(".compared"), (row) => {
      const [left, right] = row.querySelectorAll(".markdown, .plain");
      return left && right ? ([left, right] as const) : [];
    }).filter((pair) => pair.length === 2) as [Element, Element][];
    const { differ, of } = mark(pairs);
    setTold(differ ? `${differ} of ${of} words differ` : "The answers are the same, word for word");
    return unmark;
  }, [busy, wanted, all]);

  function scrolled({ currentTarget: { scrollHeight, scrollTop, clientHeight } }: { currentTarget: HTMLElement }) {
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
  }

  return (
    <div class={`compare ${opened.value === null ? "" : "shows-settings"}`}>
      <section class="conversation" aria-label="Comparison">
        <div class="chat-bar">
          <h1>Compare</h1>
          <label class="check">
            <input type="checkbox" checked={wanted} onChange={(event) => (marking.value = event.currentTarget.checked)} />
            Mark what differs
          </label>
          <span role="status" class="told">
            {told}
          </span>
          <button class="quiet" type="button" disabled={!all.length} onClick={clear}>
            Clear
          </button>
        </div>
        <div class="compare-heads">
          {SIDES.map((side) => (
            <Head key={side} side={side} />
          ))}
        </div>
        <div ref={list} class="compare-turns" role="log" aria-label="Answers" aria-busy={busy} tabIndex={0} onScroll={scrolled}>
          {!all.length && (
            <div class="welcome">
              <h2>One question, two answers</h2>
              <p>
                {isRouter.value ? "Choose a model for each side, or" : "Give"} each side its settings, such as another temperature or system prompt, then ask both
                the same.
              </p>
            </div>
          )}
          {all.map(({ question, answers }) => (
            <section key={question.id} class="turn">
              <article class="message user" aria-label="You">
                <div class="said" dir="auto">
                  {shown(question.content)}
                </div>
              </article>
              <div class="compared">
                {SIDES.map((side) => (
                  <AnswerView
                    key={side}
                    side={side}
                    message={answers[side]}
                    grows={growing.value.includes(side) && question === all.at(-1)!.question}
                  />
                ))}
              </div>
            </section>
          ))}
        </div>
        <Composer place="compare" busy={busy} onStop={stop} onSend={ask} />
      </section>
      {opened.value !== null && (
        <SettingsPanel
          key={opened.value}
          title={`${NAMES[opened.value]} side`}
          settings={sideSettings(opened.value)}
          onChange={(changes) => changeSide(opened.value!, changes)}
          onClose={() => (opened.value = null)}
        />
      )}
    </div>
  );
}

/** What a side asks of the model, in a line. */
function Head({ side }: { side: Side }) {
  const { model, system, parameters, schema } = sideSettings(side);
  const said = [
    isRouter.value ? "" : (props.value.model_alias ?? ""),
    ...Object.entries(parameters).map(([name, value]) => `${name} ${JSON.stringify(value)}`),
    system.trim() && "system prompt",
    schema.trim() && "JSON schema",
  ].filter(Boolean);
  return (
    <div class="compare-head">
      <b class="side">{NAMES[side]}</b>
      <ModelPicker label={`${NAMES[side]} model`} chosen={model} onChoose={(one) => changeSide(side, { model: one })} />
      <span class="what">{shown(said.join(" · "))}</span>
      <button
        class="quiet small"
        type="button"
        aria-label={`${NAMES[side]} settings`}
        aria-expanded={opened.value === side}
        onClick={() => (opened.value = opened.value === side ? null : side)}
      >
        <Icon name="sliders" /> Settings
      </button>
    </div>
  );
}

const AnswerView = memo(({ side, message, grows }: { side: Side; message: Message; grows: boolean }) => {
  const [probs, setProbs] = useState(false);
  return (
    <article class="message assistant" aria-label={`${NAMES[side]} answer`}>
      <Thoughts message={message} grows={grows} />
      {probs && message.probs ? <Probabilities tokens={message.probs} /> : <Markdown text={message.content} settled={!grows} />}
      {message.toolCalls?.map((call) => (
        <pre key={call.id} class="tool-call">
          {shown(`${call.name} ${call.arguments}`)}
        </pre>
      ))}
      {grows && !message.content && !message.reasoning && (
        <p class="waiting">
          <span class="dots" />
        </p>
      )}
      {message.error && <p class="notice">{shown(message.error)}</p>}
      {!grows && message.ending === "interrupted" && <p class="ending">Interrupted: the answer is incomplete.</p>}
      <footer class="message-foot">
        {message.probs && (
          <button class="quiet small" type="button" aria-pressed={probs} onClick={() => setProbs(!probs)}>
            Probabilities
          </button>
        )}
        {message.stats && <Took stats={message.stats} grows={grows} />}
      </footer>
    </article>
  );
});
