import { useRef, useState } from "preact/hooks";
import { stream } from "../api/http";

interface Message {
  role: "user" | "assistant";
  content: string;
}

interface Chunk {
  choices?: { delta?: { content?: string | null } }[];
}

export function Chat() {
  const [messages, setMessages] = useState<Message[]>([]);
  const [failure, setFailure] = useState("");
  const field = useRef<HTMLTextAreaElement>(null);
  const running = useRef<AbortController | null>(null);

  async function submit(event: Event) {
    event.preventDefault();
    const content = field.current?.value.trim();
    if (!content || running.current) return;
    field.current!.value = "";
    setFailure("");
    const asked: Message[] = [...messages, { role: "user", content }];
    setMessages(asked);
    running.current = new AbortController();
    let answer = "";
    try {
      const body = { messages: asked, stream: true };
      for await (const chunk of stream("POST", "v1/chat/completions", { body, signal: running.current.signal })) {
        answer += (chunk as Chunk).choices?.[0]?.delta?.content ?? "";
        setMessages([...asked, { role: "assistant", content: answer }]);
      }
    } catch (error) {
      if (!running.current.signal.aborted) setFailure(error instanceof Error ? error.message : String(error));
    } finally {
      running.current = null;
    }
  }

  return (
    <section class="chat">
      <div class="messages" role="log" aria-label="Conversation">
        {messages.map((message, index) => (
          <article key={index} class={`message ${message.role}`}>
            {message.content}
          </article>
        ))}
      </div>
      {failure && <p class="notice" role="alert">{failure}</p>}
      <form class="composer" onSubmit={(event) => void submit(event)}>
        <label class="hidden" for="message">Message</label>
        <textarea
          id="message"
          ref={field}
          rows={2}
          placeholder="Ask something"
          onKeyDown={(event) => {
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing) void submit(event);
          }}
        />
        <button class="primary" type="submit">Send</button>
      </form>
    </section>
  );
}
