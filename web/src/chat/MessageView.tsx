import { memo } from "preact/compat";
import { useRef, useState } from "preact/hooks";
import { modelFor, models } from "../api/server";
import { Markdown } from "../markdown/Markdown";
import { shown } from "../markdown/visible";
import { confirmed } from "../ui/Confirm";
import { Copy } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { busy as isBusy, goOn, regenerate, sendAgain, show } from "./answering";
import { Probabilities } from "./Probabilities";
import { keep, removeMessage, shownSettings } from "./store";
import { ToolCalls } from "./ToolCalls";
import { Took } from "./Took";
import { Thoughts } from "./Thoughts";
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
  interrupted: "Interrupted: the answer is incomplete. Choose Continue for the rest.",
};

/** One message: what it says, what it took, and what can be done with it. */
export const MessageView = memo(({ message, all, grows, progress }: Given) => {
  const [edits, setEdits] = useState(false);
  const [probs, setProbs] = useState(false);
  const name = { user: "You", assistant: message.model || "Model", tool: "Tool" }[message.role];
  return (
    <article class={`message ${message.role} ${grows ? "grows" : ""}`} aria-label={name}>
      {message.role !== "user" && (
        <div class="who" aria-hidden="true">
          {message.role === "tool" ? <Icon name="tool" /> : <i />} {message.role === "tool" ? "Result of the tool" : shown(name)}
        </div>
      )}
      {message.attachments?.map((one, index) => (
        <details key={index} class="attached">
          <summary>
            <Icon name="file" /> {shown(one.name)}
          </summary>
          <pre>{shown(one.text.slice(0, 20_000))}</pre>
        </details>
      ))}
      <Thoughts message={message} grows={grows} />
      {edits ? (
        <Editor message={message} onDone={() => setEdits(false)} />
      ) : probs && message.probs ? (
        <Probabilities tokens={message.probs} />
      ) : message.role === "assistant" ? (
        <Markdown text={message.content} settled={!grows} />
      ) : (
        message.content && (
          <div class="said" dir="auto">
            {shown(message.content)}
          </div>
        )
      )}
      {grows && !message.content && !message.reasoning && <Waiting progress={progress} />}
      {message.toolCalls && !grows && <ToolCalls message={message} />}
      {message.error && <p class="notice">{shown(message.error)}</p>}
      {!grows && message.ending && ENDINGS[message.ending] && <p class="ending">{ENDINGS[message.ending]}</p>}
      {!edits && (
        <footer class="message-foot">
          <Versions message={message} all={all} />
          {!grows && <Actions message={message} probs={probs} onProbs={() => setProbs(!probs)} onEdit={() => setEdits(true)} />}
          {message.stats && <Took stats={message.stats} grows={grows} />}
        </footer>
      )}
    </article>
  );
});

/** What is done before the first token. */
function Waiting({ progress }: { progress: number | undefined }) {
  const model = modelFor(shownSettings().model);
  const loads = progress === undefined && models.value.some((one) => one.id === model && one.status && one.status.value !== "loaded");
  return (
    <p class="waiting" role="status">
      {loads && <>Loading {shown(model)} </>}
      {progress !== undefined && progress < 1 ? (
        <>
          Reading the prompt <progress value={progress} /> {Math.round(100 * progress)}%
        </>
      ) : (
        <span class="dots">
          <span class="hidden">Waiting for the first token</span>
        </span>
      )}
    </p>
  );
}

interface ActionsGiven {
  message: Message;
  probs: boolean;
  onProbs: () => void;
  onEdit: () => void;
}

/** What can be done with a message that is there. */
function Actions({ message, probs, onProbs, onEdit }: ActionsGiven) {
  const busy = isBusy.value;
  async function remove() {
    const yes = await confirmed("Delete this message?", "It goes with all that follows it, and is kept nowhere else.", "Delete");
    if (yes) void removeMessage(message);
  }
  return (
    <span class="actions">
      <Copy text={message.content} bare />
      <IconButton icon="pencil" label="Edit" disabled={busy} onClick={onEdit} />
      {message.role === "assistant" && (
        <>
          <IconButton icon="again" label="Regenerate" disabled={busy} onClick={() => void regenerate(message)} />
          <IconButton icon="forward" label="Continue" disabled={busy} onClick={() => void goOn(message)} />
        </>
      )}
      {message.probs && <IconButton icon="bars" label="Probabilities" pressed={probs} onClick={onProbs} />}
      <IconButton icon="trash" label="Delete" disabled={busy} onClick={() => void remove()} />
    </span>
  );
}

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
