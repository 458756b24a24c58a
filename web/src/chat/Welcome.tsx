import { isBaseModel, isRouter, type Modalities, modalitiesOf, modelFor, models, props } from "../api/server";
import { displayText } from "../markdown/displayText";
import { Logo } from "../shell/Logo";
import { labels } from "../text";
import { formatBytes } from "../ui/format";
import { Rich } from "../ui/Rich";
import { send } from "./actions";
import { shownSettings } from "./store";

function inputOf({ image, audio }: Modalities): string {
  const t = labels.value.chat.accepts;
  return image && audio ? t.both : image ? t.image : audio ? t.audio : "";
}

/** Heading of an empty chat: the model, its size, context and input. */
export function Welcome() {
  const t = labels.value.chat;
  const name = isRouter.value ? modelFor(shownSettings().model) : props.value.model_alias;
  const context = props.value.default_generation_settings?.n_ctx;
  const meta = models.value.find((one) => one.id === name)?.meta;
  const facts = [
    meta?.n_params && meta.size ? t.modelSize(meta.n_params, formatBytes(meta.size)) : "",
    context ? t.contextSize(context) : "",
    isRouter.value ? "" : inputOf(modalitiesOf("")),
    isRouter.value ? t.modelsToChoose(models.value.length) : "",
    props.value.chats_kept ? t.storedOnServer : t.storedInBrowser,
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
    </div>
  );
}

/** Example prompts of an empty chat. */
export function Examples() {
  return (
    <ul class="examples">
      {labels.value.chat.examples.map(([title, prompt]) => (
        <li key={title}>
          <button type="button" onClick={() => void send(prompt, [])}>
            <b>{title}</b>
            <span>{prompt}</span>
          </button>
        </li>
      ))}
    </ul>
  );
}
