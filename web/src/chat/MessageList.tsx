import { useRef } from "preact/hooks";
import { isRouter, modelFor, models, onlyGoesOn, props } from "../api/server";
import { shown } from "../markdown/visible";
import { Logo } from "../shell/Logo";
import { address } from "../shell/route";
import { Icon } from "../ui/Icon";
import { growing, send, shownPath } from "./answering";
import { useFollowing } from "./following";
import { MessageView } from "./MessageView";
import { current, isOpen, messages, shownSettings } from "./store";

/** The messages of the branch that is shown. It follows the end until the reader scrolls up. */
export function MessageList() {
  const place = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const path = shownPath.value;
  const question = path.findLast((message) => message.role === "user");
  const { isFollowing, toEnd, on } = useFollowing(place, content, `${current.value?.id} ${question?.id}`);

  return (
    <div class="messages-place">
      <div
        ref={place}
        class="messages"
        role="log"
        aria-label="Messages"
        aria-busy={path.some((message) => growing.value.has(message.id))}
        tabIndex={0}
        {...on}
      >
        <div ref={content} class="messages-content">
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
      </div>
      {!isFollowing && path.length > 0 && (
        <button class="latest" type="button" onClick={toEnd}>
          <Icon name="down" /> Latest
        </button>
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
