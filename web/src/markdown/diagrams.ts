// Mermaid diagrams as SVG images. The library runs in a frame without an origin, whose document forbids all requests
// (public/preview.html) and all scripts but the two with a nonce. The page shows its SVG as an image only: browsers run no
// scripts, follow no links and load nothing in an image. The frame is loaded with the first diagram.
import library from "@mermaid-js/tiny/dist/mermaid.tiny.js?raw";
import runner from "./diagramFrame.js?raw";

/** A frame that takes longer is discarded: a diagram may keep the library busy forever. */
const MAX_MS = 20_000;

export interface Diagram {
  svg: string;
  /** The diagram's `accTitle`; "" if it has none. */
  title: string;
}

type Answer = Diagram | { error: string };

class DiagramFrame {
  private readonly element = document.createElement("iframe");
  private readonly port: Promise<MessagePort>;

  constructor() {
    this.element.className = "diagram-frame";
    this.element.setAttribute("sandbox", "allow-scripts");
    this.element.setAttribute("aria-hidden", "true");
    this.element.tabIndex = -1;
    this.element.src = "./preview.html";
    this.element.addEventListener("load", () => this.element.contentWindow?.postMessage(frameDocument(), "*"), { once: true });
    this.port = this.connect();
    document.body.append(this.element);
  }

  remove(): void {
    this.element.remove();
  }

  /** Return the SVG of a diagram. Rejects if the code is invalid. */
  async draw(code: string, isDark: boolean): Promise<Diagram> {
    const port = await this.port;
    const answer = await new Promise<Answer>((resolve) => {
      port.onmessage = ({ data }) => resolve(data as Answer);
      port.postMessage({ code, isDark });
    });
    if ("error" in answer) throw new Error(answer.error);
    return answer;
  }

  /** Wait until the inner frame is ready, and send it the library. */
  private connect(): Promise<MessagePort> {
    const { port1, port2 } = new MessageChannel();
    return new Promise((resolve) => {
      const ready = ({ source }: MessageEvent) => {
        const inner = this.element.contentWindow?.[0];
        if (!inner || source !== inner) return;
        removeEventListener("message", ready);
        inner.postMessage(library, "*", [port2]);
        resolve(port1);
      };
      addEventListener("message", ready);
    });
  }
}

/** Return the document of the inner frame, which runs scripts with its nonce only. */
function frameDocument(): string {
  const nonce = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  const policy = `default-src 'none'; script-src 'nonce-${nonce}'; style-src 'unsafe-inline'`;
  return `<!doctype html><meta http-equiv="Content-Security-Policy" content="${policy}"><body><script nonce="${nonce}">${runner}</script>`;
}

let frame: DiagramFrame | undefined;
let last: Promise<unknown> = Promise.resolve();

/** Return the SVG of a diagram. Rejects if the code is invalid or takes too long. */
export function drawDiagram(code: string, isDark: boolean): Promise<Diagram> {
  const drawn = last.then(() => drawInTime(code, isDark));
  last = drawn.catch(() => undefined); // the library draws one diagram at a time
  return drawn;
}

async function drawInTime(code: string, isDark: boolean): Promise<Diagram> {
  frame ??= new DiagramFrame();
  let timer: ReturnType<typeof setTimeout> | undefined;
  const late = new Promise<never>((_, reject) => {
    timer = setTimeout(() => {
      frame?.remove();
      frame = undefined;
      reject(new Error("the diagram takes too long"));
    }, MAX_MS);
  });
  return Promise.race([frame.draw(code, isDark), late]).finally(() => clearTimeout(timer));
}
