// Several answers to one question side by side, from which the user chooses one.
import { memo } from "preact/compat";
import { Markdown } from "../markdown/Markdown";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { Copy } from "../ui/Copy";
import { Icon } from "../ui/Icon";
import { AnswerStats } from "./AnswerStats";
import { streaming } from "./answer";
import { chooseAnswer } from "./actions";
import { Reasoning } from "./Reasoning";
import { busy } from "./tasks";
import { type Children, type Message, versions } from "./tree";

/** Return the answers that were requested together with one and wait for a choice; none if there is no choice. */
export function answersToChoose(all: Children, message: Message): Message[] {
  const group = message.group ? versions(all, message).filter((one) => one.group === message.group) : [];
  return group.length > 1 ? group : [];
}

export function AnswerChoice({ answers }: { answers: readonly Message[] }) {
  const t = labels.value.chat;
  return (
    <section class="choice" aria-label={t.chooseAnswer}>
      {answers.map((one, index) => {
        const now = streaming.value.get(one.id);
        return <Choice key={one.id} number={index + 1} message={now?.message ?? one} isStreaming={now !== undefined} onChoose={() => void chooseAnswer(one, answers)} />;
      })}
    </section>
  );
}

interface Props {
  number: number;
  message: Message;
  isStreaming: boolean;
  onChoose: () => void;
}

const Choice = memo(({ number, message, isStreaming, onChoose }: Props) => {
  const t = labels.value.chat;
  return (
    <article class={`message assistant ${isStreaming ? "streaming" : ""}`} aria-label={t.answerNumber(number)}>
      <div class="who" aria-hidden="true">
        <i /> {t.answerNumber(number)}
      </div>
      <Reasoning message={message} isStreaming={isStreaming} />
      <Markdown text={message.content} isComplete={!isStreaming} />
      {message.error && <p class="notice">{displayText(message.error)}</p>}
      {!isStreaming && message.ending && t.endings[message.ending] && <p class="ending">{t.endings[message.ending]}</p>}
      <footer class="message-foot">
        <button type="button" disabled={busy.value} onClick={onChoose}>
          <Icon name="check" /> {t.useAnswer}
        </button>
        <Copy text={message.content} />
        {message.stats && <AnswerStats stats={message.stats} isStreaming={isStreaming} />}
      </footer>
    </article>
  );
});
