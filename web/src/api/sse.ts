// Parser for server-sent events (WHATWG HTML, 9.2.6).

export interface ServerEvent {
  event: string;
  data: string;
}

/** Incremental parser: splits text that arrives in pieces into events, and keeps an incomplete event for the next piece. */
export class EventParser {
  private rest = "";
  private name = "";
  private data: string[] = [];

  push(text: string): ServerEvent[] {
    const lines = (this.rest + text).split(/\r\n|\n|\r(?!$)/);
    this.rest = lines.pop() ?? "";
    const found: ServerEvent[] = [];
    for (const line of lines) {
      if (line === "") {
        if (this.data.length) found.push({ event: this.name || "message", data: this.data.join("\n") });
        this.name = "";
        this.data = [];
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
      if (field === "data") this.data.push(value);
      else if (field === "event") this.name = value;
    }
    return found;
  }
}

export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
