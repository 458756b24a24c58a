import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { sendQueued } from "./actions";
import { prependDraft } from "./drafts";
import { queue, queuedAttachments, takeQueued } from "./queue";
import { busy } from "./tasks";

/** Messages of a conversation that wait for the end of an answer. */
export function QueueList({ conversation }: { conversation: string }) {
  const t = labels.value.queue;
  const waiting = queue.value.filter((one) => one.conversation === conversation);
  if (!waiting.length) return null;

  async function edit(id: string) {
    const message = await takeQueued(id);
    if (message) prependDraft(conversation, message.text, message.attachments);
  }

  return (
    <ol class="queued" aria-label={t.title}>
      {waiting.map((one, index) => (
        <li key={one.id}>
          <span class="queued-text" dir="auto">
            {displayText(one.text)}
            {queuedAttachments(one.id).map((file) => (
              <span class="chip">{displayText(file.name)}</span>
            ))}
          </span>
          {index === 0 && !busy.value && (
            <button class="quiet small" type="button" onClick={() => void sendQueued(one)}>
              <Icon name="up" /> {t.sendNow}
            </button>
          )}
          <IconButton icon="pencil" label={t.edit} onClick={() => void edit(one.id)} />
          <IconButton icon="close" label={t.remove} onClick={() => void takeQueued(one.id)} />
        </li>
      ))}
    </ol>
  );
}
