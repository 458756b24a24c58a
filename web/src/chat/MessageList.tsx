import { useRef } from "preact/hooks";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { streaming } from "./answer";
import { AnswerChoice, answersToChoose } from "./AnswerChoice";
import { useAutoscroll } from "./autoscroll";
import { MessageView } from "./MessageView";
import { current, children, isLoaded, shownPath } from "./store";
import { Welcome } from "./Welcome";

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
          {path.map((message, index) => {
            const choices = index === path.length - 1 ? answersToChoose(children.value, message) : [];
            if (choices.length) return <AnswerChoice key={message.parent} answers={choices} />;
            const now = streaming.value.get(message.id);
            return (
              <MessageView
                key={message.parent} // versions take the place of each other, and keep the focus
                message={now?.message ?? message}
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
