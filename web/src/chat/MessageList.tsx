import { useRef } from "preact/hooks";
import { isRouter, type Modalities, modalitiesOf, modelFor, models, isBaseModel, props } from "../api/server";
import { displayText } from "../markdown/displayText";
import { Logo } from "../shell/Logo";
import { address } from "../shell/route";
import { Icon } from "../ui/Icon";
import { streaming, send, shownPath } from "./actions";
import { useAutoscroll } from "./autoscroll";
import { MessageView } from "./MessageView";
import { current, isLoaded, messages, shownSettings } from "./store";

/** Messages of the current branch. Scrolls to the end as they grow, until the user scrolls up. */
export function MessageList() {
  const place = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const path = shownPath.value;
  const question = path.findLast((message) => message.role === "user");
  const { isFollowing, scrollToEnd, on } = useAutoscroll(place, content, `${current.value?.id} ${question?.id}`);

  return (
    <div class="messages-place">
      <div
        ref={place}
        class="messages"
        role="log"
        aria-label="Messages"
        aria-busy={path.some((message) => streaming.value.has(message.id))}
        tabIndex={0}
        {...on}
      >
        <div ref={content} class="messages-content">
          {!path.length && isLoaded.value && <Welcome />}
          {path.map((message) => {
            const now = streaming.value.get(message.id);
            return (
              <MessageView
                key={message.id}
                message={now?.message ?? message}
                all={messages.value}
                isStreaming={now !== undefined}
                progress={now?.progress}
              />
            );
          })}
        </div>
      </div>
      {!isFollowing && path.length > 0 && (
        <button class="latest" type="button" onClick={scrollToEnd}>
          <Icon name="down" /> Latest
        </button>
      )}
    </div>
  );
}

/** Example prompts of an empty chat. */
const EXAMPLES: [title: string, prompt: string][] = [
  ["Explain something", "Explain in a few sentences why the sky is blue."],
  ["Write code", "Write a Python function that tells whether a word is a palindrome, with an example."],
  ["Make a table", "Make a Markdown table of the four seasons: months, weather, and what to wear."],
  ["Plan a day", "Plan a day in a city by the sea: morning, noon and evening, as a short list."],
];

function inputOf({ image, audio }: Modalities): string {
  const kinds = [image && "pictures", audio && "sounds"].filter(Boolean);
  return kinds.length ? `accepts ${kinds.join(" and ")}` : "";
}

function Welcome() {
  const name = isRouter.value ? modelFor(shownSettings().model) : props.value.model_alias;
  const context = props.value.default_generation_settings?.n_ctx;
  const facts = [
    context ? `${context.toLocaleString("en")} tokens of context` : "",
    isRouter.value ? "" : inputOf(modalitiesOf("")),
    isRouter.value ? `${models.value.length} models to choose from` : "",
    "chats are stored in this browser only",
  ].filter(Boolean);
  return (
    <div class="welcome">
      <Logo />
      <h2>{displayText(name ?? "llamado")}</h2>
      <p>{facts.join(" · ")}</p>
      {isBaseModel.value && (
        <p class="hint">
          This is a base model without a chat template: it continues text, as in <a href={address("complete")}>Complete</a>. Answers end after
          1,024 tokens unless <code>max_tokens</code> is set.
        </p>
      )}
      <ul class="examples">
        {EXAMPLES.map(([title, prompt]) => (
          <li key={title}>
            <button type="button" onClick={() => void send(prompt, [])}>
              <b>{title}</b>
              <span>{prompt}</span>
            </button>
          </li>
        ))}
      </ul>
    </div>
  );
}
