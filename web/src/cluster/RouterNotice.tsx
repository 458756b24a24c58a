import { labels } from "../text";
import { Rich } from "../ui/Rich";

/** Shown instead of a single server's view if this address is a router. */
export function RouterNotice({ view }: { view: "cluster" | "lab" }) {
  const t = labels.value.cluster;
  return (
    <section class="start">
      <h2>{t.router}</h2>
      <p>
        <Rich text={t.routerAbout[view]} />
      </p>
      <p>
        <Rich text={t.routerModels} />
      </p>
    </section>
  );
}
