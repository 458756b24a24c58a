import { useRef } from "preact/hooks";
import { isRouter, type Modalities, modalitiesOf, modelFor, models, isBaseModel, props } from "../api/server";
import { displayText } from "../markdown/displayText";
import { Logo } from "../shell/Logo";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { Rich } from "../ui/Rich";
import { streaming, send, shownPath } from "./actions";
import { useAutoscroll } from "./autoscroll";
import { MessageView } from "./MessageView";
import { current, isLoaded, messages, shownSettings } from "./store";

/** Messages of the current branch. Scrolls to the end as they grow, until the user scrolls up. */
export function MessageList() {
  const t = labels.value.chat;
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
        aria-label={t.messages}
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
          <Icon name="down" /> {t.latest}
        </button>
      )}
    </div>
  );
}

function inputOf({ image, audio }: Modalities): string {
  const t = labels.value.chat.accepts;
  return image && audio ? t.both : image ? t.image : audio ? t.audio : "";
}

function Welcome() {
  const t = labels.value.chat;
  const name = isRouter.value ? modelFor(shownSettings().model) : props.value.model_alias;
  const context = props.value.default_generation_settings?.n_ctx;
  const facts = [
    context ? t.contextSize(context) : "",
    isRouter.value ? "" : inputOf(modalitiesOf("")),
    isRouter.value ? t.modelsToChoose(models.value.length) : "",
    t.storedInBrowser,
  ].filter(Boolean);
  return (
    <div class="welcome">
      <Logo />
      <h2>{displayText(name ?? "llamado")}</h2>
      <p>{facts.join(" · ")}</p>
      {isBaseModel.value && (
        <p class="hint">
          <Rich text={t.baseModel} />
        </p>
      )}
      <ul class="examples">
        {t.examples.map(([title, prompt]) => (
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
