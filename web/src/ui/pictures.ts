// What is drawn while an answer streams in.

/** At most one call for each picture of the screen, and time for the reader's clicks between two. */
export class Pictures {
  private asked = false;
  private ended = false;
  private took = 0;

  constructor(private readonly draw: () => void) {}

  want(): void {
    if (this.asked || this.ended) return;
    this.asked = true;
    const run = () => {
      this.asked = false;
      if (this.ended) return;
      const began = performance.now();
      this.draw();
      this.took = performance.now() - began;
    };
    // A long text takes long to lay out: then pictures are fewer. A hidden page gets none at all from the browser.
    if (this.took > 8 || document.hidden) setTimeout(run, this.took * 4);
    else requestAnimationFrame(run);
  }

  end(): void {
    this.ended = true;
  }
}
