// Rendering while an answer streams.

/** Calls `draw` at most once per animation frame, and leaves time for user input between two calls. */
export class FrameScheduler {
  private isRequested = false;
  private isEnded = false;
  private drawMs = 0;

  constructor(private readonly draw: () => void) {}

  request(): void {
    if (this.isRequested || this.isEnded) return;
    this.isRequested = true;
    const run = () => {
      this.isRequested = false;
      if (this.isEnded) return;
      const began = performance.now();
      this.draw();
      this.drawMs = performance.now() - began;
    };
    // Long texts take long to lay out, so they are drawn less often. Browsers give a hidden page no frames.
    if (this.drawMs > 8 || document.hidden) setTimeout(run, this.drawMs * 4);
    else requestAnimationFrame(run);
  }

  end(): void {
    this.isEnded = true;
  }
}
