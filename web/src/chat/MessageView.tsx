import { memo } from "preact/compat";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { modelFor } from "../api/server";
import { Markdown } from "../markdown/Markdown";
import { displayText } from "../markdown/displayText";
import { MediaRow } from "../media/MediaView";
import { labels } from "../text";
import { Copy } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { notify } from "../ui/Notices";
import { continueAnswer, regenerate, showVersion } from "./actions";
import { Editor } from "./Editor";
import { Probabilities } from "./Probabilities";
import { children, removeMessage, shownSettings } from "./store";
import { busy } from "./tasks";
import { ToolCalls } from "./ToolCalls";
import { AnswerStats } from "./AnswerStats";
import { Reasoning } from "./Reasoning";
import { Waiting } from "./Waiting";
import { isText, type Message, versions } from "./tree";

interface Props {
  message: Message;
  isStreaming: boolean;
  progress: number | undefined;
}

/** One message: content, statistics and actions. */
export const MessageView = memo(({ message, isStreaming, progress }: Props) => {
  const t = labels.value.chat;
  const [edits, setEdits] = useState(false);
  const [probs, setProbs] = useState(false);
  const article = useRef<HTMLElement>(null);
  useLayoutEffect(() => {
    setEdits(false);
    setProbs(false);
  }, [message.id]); // another version
  const returnsFocus = useRef(false);
  useLayoutEffect(() => {
    // Not a frame later: the user may type elsewhere by then.
    if (!edits && returnsFocus.current) article.current?.querySelector<HTMLElement>(".edit")?.focus();
    returnsFocus.current = false;
  }, [edits]);
  function endEditing() {
    returnsFocus.current = true;
    setEdits(false);
  }
  const name = { user: labels.value.common.you, assistant: message.model || labels.value.common.model, tool: t.tool }[message.role];
  return (
    <article ref={article} class={`message ${message.role} ${isStreaming ? "streaming" : ""}`} aria-label={name}>
      {message.role !== "user" && (
        <div class="who" aria-hidden="true">
          {message.role === "tool" ? <Icon name="tool" /> : <i />} {message.role === "tool" ? t.toolResult : displayText(name)}
        </div>
      )}
      <MediaRow attachments={message.attachments} />
      {message.attachments?.filter(isText).map((one, index) => (
        <details key={index} class="attached">
          <summary>
            <Icon name="file" /> {displayText(one.name)}
          </summary>
          <pre>{displayText(one.text.slice(0, 20_000))}</pre>
        </details>
      ))}
      <Reasoning message={message} isStreaming={isStreaming} />
      {edits ? (
        <Editor message={message} onDone={endEditing} />
      ) : probs && message.probs ? (
        <Probabilities tokens={message.probs} />
      ) : message.role === "assistant" ? (
        <Markdown text={message.content} isComplete={!isStreaming} />
      ) : (
        message.content && (
          <div class="message-text" dir="auto">
            {displayText(message.content)}
          </div>
        )
      )}
      {isStreaming && !message.content && !message.reasoning && <Waiting progress={progress} model={modelFor(shownSettings().model)} />}
      {message.toolCalls && !isStreaming && <ToolCalls message={message} />}
      {message.error && <p class="notice">{displayText(message.error)}</p>}
      {!isStreaming && message.ending && t.endings[message.ending] && <p class="ending">{t.endings[message.ending]}</p>}
      {!edits && (
        <footer class="message-foot">
          <Versions message={message} />
          {!isStreaming && <Actions message={message} probs={probs} onProbs={() => setProbs(!probs)} onEdit={() => setEdits(true)} />}
          {message.stats && <AnswerStats stats={message.stats} isStreaming={isStreaming} />}
        </footer>
      )}
    </article>
  );
});

interface ActionsProps {
  message: Message;
  probs: boolean;
  onProbs: () => void;
  onEdit: () => void;
}

/** Actions for a complete message. */
function Actions({ message, probs, onProbs, onEdit }: ActionsProps) {
  const t = labels.value.chat;
  async function remove() {
    const undo = await removeMessage(message);
    notify(t.messageDeleted, [t.undo, () => void undo()]);
  }
  return (
    <span class="actions">
      <Copy text={message.content} />
      <IconButton kind="edit" icon="pencil" label={t.edit} hasWord disabled={busy} onClick={onEdit} />
      {message.role === "assistant" && (
        <>
          <IconButton icon="again" label={t.regenerate} hasWord disabled={busy} onClick={() => void regenerate(message)} />
          <IconButton icon="forward" label={t.continue} disabled={busy} onClick={() => void continueAnswer(message)} />
        </>
      )}
      {message.probs && <IconButton icon="bars" label={labels.value.common.probabilities} pressed={probs} onClick={onProbs} />}
      <IconButton icon="trash" label={labels.value.common.delete} disabled={busy} onClick={() => void remove()} />
    </span>
  );
}

/** Switch between the versions of a message. */
function Versions({ message }: { message: Message }) {
  const t = labels.value.chat;
  const others = versions(children.value, message);
  if (others.length < 2) return null;
  const at = others.findIndex((one) => one.id === message.id);
  const isBusy = busy.value;
  // Buttons without an effect keep the focus.
  const show = (index: number) => !isBusy && others[index] && void showVersion(others[index]);
  return (
    <span class="versions">
      <button
        class="quiet small"
        type="button"
        aria-label={t.previousVersion}
        aria-disabled={isBusy || at === 0}
        onClick={() => show(at - 1)}
      >
        <Icon name="left" />
      </button>
      {t.version(at + 1, others.length)}
      <button
        class="quiet small"
        type="button"
        aria-label={t.nextVersion}
        aria-disabled={isBusy || at === others.length - 1}
        onClick={() => show(at + 1)}
      >
        <Icon name="right" />
      </button>
    </span>
  );
}
