/** Said where a view is of one server, and this address is of many. */
export function BehindRouter({ what }: { what: string }) {
  return (
    <section class="start">
      <h2>This address is a router</h2>
      <p>
        Behind it each model has a server of its own, which runs on this machine. A model that is divided among machines, and its {what}, is seen at the
        address of its own <code>llamado serve --rpc HOST</code>.
      </p>
      <p>
        The models of this router are in <a href="#/live">Live</a>.
      </p>
    </section>
  );
}
