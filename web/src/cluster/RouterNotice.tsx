/** Shown instead of a single server's view if this address is a router. */
export function RouterNotice({ view }: { view: string }) {
  return (
    <section class="start">
      <h2>This address is a router</h2>
      <p>
        A router runs one server per model on this machine. To see the {view} of a model that is split over machines, open the address of its own{" "}
        <code>llamado serve --rpc HOST</code>.
      </p>
      <p>
        To see the models of this router, open <a href="#/live">Live</a>.
      </p>
    </section>
  );
}
