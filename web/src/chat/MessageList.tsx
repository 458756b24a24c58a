import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { isRouter, modelFor, models, onlyGoesOn, props } from "../api/server";
import { shown } from "../markdown/visible";
import { Logo } from "../shell/Logo";
import { address } from "../shell/route";
import { IconButton } from "../ui/IconButton";
import { growing, send, shownPath } from "./answering";
import { MessageView } from "./MessageView";
import { isOpen, messages, shownSettings } from "./store";

const NEAR_END = 60; // pixels

/** The messages of the branch that is shown. It follows the end while the reader is there. */
export function MessageList() {
  const list = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const [away, setAway] = useState(false);
  const path = shownPath.value;

  useLayoutEffect(() => {
    follows.current = true;
  }, [path.length]);
  useLayoutEffect(() => {
    const place = list.current;
    if (!place || !follows.current) return;
    const toEnd = () => (place.scrollTop = place.scrollHeight);
    toEnd();
    // Messages get their true heights when they come into view.
    const frame = requestAnimationFrame(toEnd);
    return () => cancelAnimationFrame(frame);
  });

  useLayoutEffect(() => {
    // What is written below may need more lines, or a phone raises its keys.
    const place = list.current!;
    const sized = new ResizeObserver(() => {
      if (follows.current) place.scrollTop = place.scrollHeight;
    });
    sized.observe(place);
    return () => sized.disconnect();
  }, []);

  return (
    <div class="messages-place">
      <div
        ref={list}
        class="messages"
        role="log"
        aria-label="Messages"
        aria-busy={path.some((message) => growing.value.has(message.id))}
        tabIndex={0}
        onScroll={(event) => {
          const { scrollHeight, scrollTop, clientHeight } = event.currentTarget;
          const left = scrollHeight - scrollTop - clientHeight;
          follows.current = left < NEAR_END;
          setAway(left > clientHeight / 2);
        }}
      >
        {!path.length && isOpen.value && <Welcome />}
        {path.map((message) => {
          const now = growing.value.get(message.id);
          return (
            <MessageView
              key={message.id}
              message={now?.message ?? message}
              all={messages.value}
              grows={now !== undefined}
              progress={now?.progress}
            />
          );
        })}
      </div>
      {away && path.length > 0 && (
        <IconButton
          kind="to-end"
          icon="down"
          label="To the end"
          onClick={() => {
            follows.current = true;
            list.current!.scrollTop = list.current!.scrollHeight;
          }}
        />
      )}
    </div>
  );
}

/** What one may ask first. */
const EXAMPLES: [title: string, asked: string][] = [
  ["Explain something", "Explain in a few sentences why the sky is blue."],
  ["Write code", "Write a Python function that tells whether a word is a palindrome, with an example."],
  ["Make a table", "Make a Markdown table of the four seasons: months, weather, and what to wear."],
  ["Plan a day", "Plan a day in a city by the sea: morning, noon and evening, as a short list."],
];

function Welcome() {
  const name = isRouter.value ? modelFor(shownSettings().model) : props.value.model_alias;
  const context = props.value.default_generation_settings?.n_ctx;
  const facts = [
    context ? `${context.toLocaleString("en")} tokens of context` : "",
    isRouter.value ? `${models.value.length} models to choose from` : "",
    "chats stay in this browser",
  ].filter(Boolean);
  return (
    <div class="welcome">
      <Logo />
      <h2>{shown(name ?? "llamado")}</h2>
      <p>{facts.join(" · ")}</p>
      {onlyGoesOn.value && (
        <p class="hint">
          This model was not made for conversations: it goes on with texts, as in <a href={address("complete")}>Complete</a>. Answers end after
          1,024 tokens here unless <code>max_tokens</code> says otherwise.
        </p>
      )}
      <ul class="examples">
        {EXAMPLES.map(([title, asked]) => (
          <li key={title}>
            <button type="button" onClick={() => void send(asked, [])}>
              <b>{title}</b>
              <span>{asked}</span>
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}
