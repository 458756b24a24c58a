// Parser for server-sent events (WHATWG HTML, 9.2.6).

export interface ServerEvent {
  event: string;
  data: string;
  /** Bytes of the stream up to the end of this event. */
  end: number;
}

const encoder = new TextEncoder();

/** Incremental parser: splits text that arrives in pieces into events, and keeps an incomplete event for the next piece. */
export class EventParser {
  private rest = "";
  private name = "";
  private data: string[] = [];
  private end = 0;

  push(text: string): ServerEvent[] {
    const parts = (this.rest + text).split(/(\r\n|\n|\r(?!$))/); // lines and their ends in turn
    this.rest = parts.pop() ?? "";
    const found: ServerEvent[] = [];
    for (let index = 0; index < parts.length; index += 2) {
      const line = parts[index]!;
      this.end += encoder.encode(line).length + parts[index + 1]!.length;
      if (line === "") {
        if (this.data.length) found.push({ event: this.name || "message", data: this.data.join("\n"), end: this.end });
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
