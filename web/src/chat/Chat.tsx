// The chat view: conversations on the left, the current one in the middle, settings on the right.
import { effect, signal, untracked } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { modelFor, props } from "../api/server";
import { displayText } from "../markdown/displayText";
import { PictureDialog } from "../media/MediaView";
import { route } from "../shell/route";
import { subject } from "../shell/title";
import { labels } from "../text";
import { readServerTools } from "../tools/catalog";
import { Icon } from "../ui/Icon";
import { IconButton } from "../ui/IconButton";
import { persistentSignal } from "../ui/persistent";
import { send } from "./actions";
import { failure, followOtherAnswers, resumeWhenReady } from "./answer";
import { useChatKeys } from "./chatKeys";
import { Composer } from "./Composer";
import { ContextGauge } from "./ContextGauge";
import { MessageList } from "./MessageList";
import { ModelSwitcher } from "./ModelPicker";
import { PromptMenu } from "./PromptMenu";
import { pruneQueue } from "./queue";
import { QueueList } from "./QueueList";
import { SettingsPanel } from "./SettingsPanel";
import { Sidebar } from "./Sidebar";
import { changeSettings, conversations, current, isLoaded, openConversation, readConversations, shownPath, shownSettings, storageFailure } from "./store";
import { busy, stop } from "./tasks";
import { nameNewChats } from "./titles";
import { Examples } from "./Welcome";
import "./chat.css";

/** The panel that is open; on a narrow screen it covers the conversation. */
const panel = signal<"" | "list" | "settings">("");
/** True if a wide screen shows the list of chats. */
const listed = persistentSignal("chats", true);

const NARROW = matchMedia("(max-width: 820px)");

followOtherAnswers();
nameNewChats();
resumeWhenReady();

// Changes are noted even before the server's properties are known, for example without the server.
void import("./remoteSchedule").then(({ keepSynchronized }) => keepSynchronized());

// The URL selects the conversation.
effect(() => {
  const [view, id] = route.value;
  if (view && view !== "chat") return;
  untracked(() => {
    failure.value = ""; // it belongs to another conversation
    void openConversation(id || null);
  });
});

function toggleList(): void {
  if (NARROW.matches) panel.value = panel.value === "list" ? "" : "list";
  else listed.value = !listed.value;
}

function showList(): void {
  if (NARROW.matches) panel.value = "list";
  else listed.value = true;
}

function toggleSettings(): void {
  panel.value = panel.value === "settings" ? "" : "settings";
}

export function Chat() {
  const t = labels.value.chat;
  useChatKeys({ showList, toggleList, toggleSettings });
  useEffect(() => {
    subject.value = current.value?.title ?? "";
  }, [current.value?.title]);
  useEffect(() => () => void (subject.value = ""), []);
  useEffect(() => {
    void readConversations().then(() => pruneQueue(new Set(conversations.value.map((one) => one.id))));
  }, []);
  useEffect(() => void readServerTools(), [props.value]);
  const settings = shownSettings();
  const model = modelFor(settings.model);
  const place = route.value[1] || "new"; // of the draft
  const isEmpty = isLoaded.value && !shownPath.value.length;

  return (
    <div class={`chat ${panel.value && `shows-${panel.value}`} ${listed.value ? "lists" : ""}`}>
      <Sidebar onChosen={() => (panel.value = "")} onClose={toggleList} />
      <section class={isEmpty ? "conversation empty" : "conversation"} aria-label={t.conversation}>
        <div class="chat-bar">
          <IconButton icon="side" label={t.chats} expanded={NARROW.matches ? panel.value === "list" : listed.value} onClick={toggleList} />
          <h1 dir="auto">{displayText(current.value?.title ?? t.newChat)}</h1>
          <button
            class="quiet"
            type="button"
            aria-expanded={panel.value === "settings"}
            onClick={toggleSettings}
          >
            <Icon name="sliders" /> <span class="word">{labels.value.common.settings}</span>
          </button>
        </div>
        <MessageList />
        {[failure.value, storageFailure.value].filter(Boolean).map((text) => (
          <p key={text} class="notice" role="alert">
            {text}
          </p>
        ))}
        {current.value && <QueueList conversation={current.value.id} />}
        <Composer place={place} busy={busy.value} canQueue={current.value !== null} onStop={stop} onSend={send} models={[model]}>
          <ModelSwitcher chosen={settings.model} onChoose={(one) => void changeSettings({ model: one })} />
          <PromptMenu place={place} />
          <ContextGauge place={place} model={model} />
        </Composer>
        {isEmpty && <Examples />}
        <PictureDialog />
      </section>
      {panel.value === "settings" && <SettingsPanel onClose={() => (panel.value = "")} />}
    </div>
  );
}
