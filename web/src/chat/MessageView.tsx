import { memo } from "preact/compat";
import { useRef, useState } from "preact/hooks";
import { Markdown } from "../markdown/Markdown";
import { shown } from "../markdown/visible";
import { Copy } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { busy as isBusy, goOn, regenerate, sendAgain, show } from "./answering";
import { Probabilities } from "./Probabilities";
import { keep, removeMessage } from "./store";
import { ToolCalls } from "./ToolCalls";
import { Took } from "./Took";
import { type Message, type Messages, versions } from "./tree";

interface Given {
  message: Message;
  all: Messages;
  grows: boolean;
  progress: number | undefined;
}

const ENDINGS: Partial<Record<string, string>> = {
  length: "The answer was cut: no tokens were left.",
  aborted: "Stopped.",
};

/** One message: what it says, what it took, and what can be done with it. */
export const MessageView = memo(({ message, all, grows, progress }: Given) => {
  const [edits, setEdits] = useState(false);
  const [probs, setProbs] = useState(false);
  const busy = isBusy.value;
  const name = { user: "You", assistant: message.model || "Model", tool: "Tool" }[message.role];
  return (
    <article class={`message ${message.role}`} aria-label={name}>
      {message.attachments?.map((one, index) => (
        <details key={index} class="attached">
          <summary>{shown(one.name)}</summary>
          <pre>{shown(one.text.slice(0, 20_000))}</pre>
        </details>
      ))}
      {message.reasoning && (
        <details class="thinking" open={grows && !message.content}>
          <summary>{grows && !message.content ? "Thinking…" : "Thoughts"}</summary>
          <Markdown text={message.reasoning} settled={!grows} />
        </details>
      )}
      {edits ? (
        <Editor message={message} onDone={() => setEdits(false)} />
      ) : probs && message.probs ? (
        <Probabilities tokens={message.probs} />
      ) : message.role === "assistant" ? (
        <Markdown text={message.content} settled={!grows} />
      ) : (
        <div class="said" dir="auto">
          {shown(message.content)}
        </div>
      )}
      {grows && !message.content && !message.reasoning && (
        <p class="waiting" role="status">
          {progress !== undefined && progress < 1 ? (
            <>
              Reading the prompt <progress value={progress} />
            </>
          ) : (
            "…"
          )}
        </p>
      )}
      {message.toolCalls && !grows && <ToolCalls message={message} />}
      {message.error && <p class="notice">{shown(message.error)}</p>}
      {!grows && message.ending && ENDINGS[message.ending] && <p class="ending">{ENDINGS[message.ending]}</p>}
      {!edits && (
        <footer class="message-foot">
          <Versions message={message} all={all} />
          {!grows && (
            <>
              <Copy text={message.content} />
              <button class="quiet small" type="button" disabled={busy} onClick={() => setEdits(true)}>
                Edit
              </button>
              {message.role === "assistant" && (
                <>
                  <button class="quiet small" type="button" disabled={busy} onClick={() => void regenerate(message)}>
                    Regenerate
                  </button>
                  <button class="quiet small" type="button" disabled={busy} onClick={() => void goOn(message)}>
                    Continue
                  </button>
                </>
              )}
              {message.probs && (
                <button class="quiet small" type="button" aria-pressed={probs} onClick={() => setProbs(!probs)}>
                  Probabilities
                </button>
              )}
              <button
                class="quiet small"
                type="button"
                disabled={busy}
                onClick={() => {
                  if (confirm("Delete this message and all that follows it?")) void removeMessage(message);
                }}
              >
                Delete
              </button>
            </>
          )}
          {message.stats && <Took stats={message.stats} />}
        </footer>
      )}
    </article>
  );
});

/** The versions beside this one, to walk between. */
function Versions({ message, all }: { message: Message; all: Messages }) {
  const others = versions(all, message);
  if (others.length < 2) return null;
  const at = others.findIndex((one) => one.id === message.id);
  const busy = isBusy.value;
  return (
    <span class="versions">
      <button
        class="quiet small"
        type="button"
        aria-label="Version before"
        disabled={busy || at === 0}
        onClick={() => void show(others[at - 1]!)}
      >
        <Icon name="left" />
      </button>
      {at + 1} of {others.length}
      <button
        class="quiet small"
        type="button"
        aria-label="Next version"
        disabled={busy || at === others.length - 1}
        onClick={() => void show(others[at + 1]!)}
      >
        <Icon name="right" />
      </button>
    </span>
  );
}

function Editor({ message, onDone }: { message: Message; onDone: () => void }) {
  const field = useRef<HTMLTextAreaElement>(null);

  /** A message of the reader's gets an answer as another branch; the model's own is changed where it stands. */
  function submit(event: Event) {
    event.preventDefault();
    const content = field.current!.value;
    onDone();
    if (message.role === "user") void sendAgain(message, content);
    else void keep({ ...message, content }, { leaf: false });
  }

  return (
    <form class="editor" onSubmit={submit}>
      <label class="hidden" for={`edit-${message.id}`}>
        Edit the message
      </label>
      <textarea
        id={`edit-${message.id}`}
        ref={(area) => {
          field.current = area;
          area?.focus();
        }}
        rows={Math.min(16, message.content.split("\n").length + 2)}
        defaultValue={message.content}
      />
      <div class="row">
        <button class="primary" type="submit">
          {message.role === "user" ? "Send again" : "Keep"}
        </button>
        <button type="button" onClick={onDone}>
          Cancel
        </button>
      </div>
    </form>
  );
}
