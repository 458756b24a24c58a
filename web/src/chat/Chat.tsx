// The chat: conversations at the left, one of them in the middle, what is asked of the model at the right.
import { effect, signal, untracked } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { props } from "../api/server";
import { shown } from "../markdown/visible";
import { go, route } from "../shell/route";
import { readServerTools } from "../tools/offered";
import { busy, failure, growing, send, stop } from "./answering";
import { Composer } from "./Composer";
import { MessageList } from "./MessageList";
import { SettingsPanel } from "./SettingsPanel";
import { Sidebar } from "./Sidebar";
import { current, open, readConversations } from "./store";
import "./chat.css";

const panel = signal<"" | "list" | "settings">("");

// The address says which conversation is shown, from the moment that it is asked for.
effect(() => {
  const [view, id] = route.value;
  if (view && view !== "chat") return;
  untracked(() => {
    failure.value = ""; // of another conversation
    void open(id || null);
  });
});

export function Chat() {
  useEffect(() => void readConversations(), []);
  useEffect(() => {
    // From another view one comes back to the answer that is being made.
    const now = [...growing.peek().values()].at(-1);
    if (now && !route.peek()[1]) go("chat", now.message.conversation);
  }, []);
  useEffect(() => void readServerTools(), [props.value]);

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
        <Composer busy={busy.value} onStop={stop} onSend={send} />
      </section>
      {panel.value === "settings" && <SettingsPanel onClose={() => (panel.value = "")} />}
    </div>
  );
}
