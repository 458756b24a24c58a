import { useLayoutEffect, useRef } from "preact/hooks";
import { models, props } from "../api/server";
import { growing, shownPath } from "./answering";
import { MessageView } from "./MessageView";
import { isOpen, messages } from "./store";

const NEAR_END = 60; // pixels

/** The messages of the branch that is shown. It follows the end while the reader is there. */
export function MessageList() {
  const list = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const shown = shownPath.value;

  useLayoutEffect(() => {
    follows.current = true;
  }, [shown.length]);
  useLayoutEffect(() => {
    const place = list.current;
    if (!place || !follows.current) return;
    const toEnd = () => (place.scrollTop = place.scrollHeight);
    toEnd();
    // Messages get their true heights when they come into view.
    const frame = requestAnimationFrame(toEnd);
    return () => cancelAnimationFrame(frame);
  });

  return (
    <div
      ref={list}
      class="messages"
      role="log"
      aria-label="Messages"
      aria-busy={shown.some((message) => growing.value.has(message.id))}
      tabIndex={0}
      onScroll={(event) => {
        const { scrollHeight, scrollTop, clientHeight } = event.currentTarget;
        follows.current = scrollHeight - scrollTop - clientHeight < NEAR_END;
      }}
    >
      {!shown.length && isOpen.value && <Welcome />}
      {shown.map((message) => {
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
  );
}

function Welcome() {
  const name = props.value.model_alias;
  const context = props.value.default_generation_settings?.n_ctx;
  return (
    <div class="welcome">
      <h2>{name ?? "llamado"}</h2>
      <p>
        {context ? `${context.toLocaleString()} tokens of context. ` : ""}
        {models.value.length > 1 ? `${models.value.length} models: choose one in the settings. ` : ""}
        Chats stay in this browser.
      </p>
    </div>
  );
}
