// The chat: conversations at the left, one of them in the middle, what is asked of the model at the right.
import { signal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { props } from "../api/server";
import { shown } from "../markdown/visible";
import { go, route } from "../shell/route";
import { readServerTools } from "../tools/offered";
import { busy, failure, growing, send, shownPath, stop } from "./answering";
import { Composer } from "./Composer";
import { MessageList } from "./MessageList";
import { SettingsPanel } from "./SettingsPanel";
import { Sidebar } from "./Sidebar";
import { current, open, readConversations } from "./store";
import "./chat.css";

const panel = signal<"" | "list" | "settings">("");

export function Chat() {
  const wanted = route.value[0] === "chat" ? route.value[1] || null : null;
  useEffect(() => void readConversations(), []);
  useEffect(() => {
    if (!growing.peek()) void open(wanted);
  }, [wanted]);
  const id = current.value?.id;
  useEffect(() => {
    if (id && route.peek()[1] !== id) go("chat", id);
  }, [id]);
  useEffect(() => void readServerTools(), [props.value]);

  const leaf = shownPath.value.at(-1)?.id ?? null;
  return (
    <div class={`chat ${panel.value && `shows-${panel.value}`}`}>
      <Sidebar onChosen={() => (panel.value = "")} />
      <section class="conversation" aria-label="Conversation">
        <div class="chat-bar">
          <button
            class="quiet narrow"
            type="button"
            aria-expanded={panel.value === "list"}
            onClick={() => (panel.value = panel.value === "list" ? "" : "list")}
          >
            Chats
          </button>
          <h1 dir="auto">{shown(current.value?.title ?? "New chat")}</h1>
          <button
            class="quiet"
            type="button"
            aria-expanded={panel.value === "settings"}
            onClick={() => (panel.value = panel.value === "settings" ? "" : "settings")}
          >
            Settings
          </button>
        </div>
        <MessageList />
        {failure.value && (
          <p class="notice" role="alert">
            {failure.value}
          </p>
        )}
        <Composer busy={busy.value} onStop={stop} onSend={(text, attachments) => send(text, attachments, leaf)} />
      </section>
      {panel.value === "settings" && <SettingsPanel onClose={() => (panel.value = "")} />}
    </div>
  );
}
