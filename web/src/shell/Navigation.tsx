import { labels } from "../text";
import { Icon } from "../ui/Icon";
import { addressOf } from "./route";
import { GROUPS, type View, type ViewGroup } from "./views";

/** The last open view of each group. */
const lastViews = new Map<ViewGroup, View>();

interface Props {
  group: ViewGroup;
  view: View;
}

/** Links to the groups of views: in the header, on phones at the bottom of the page. */
export function Navigation({ group, view }: Props) {
  const t = labels.value.shell;
  lastViews.set(group, view);
  return (
    <nav class="groups" aria-label={t.navigation}>
      {GROUPS.map((one) => (
        <a key={one.id} href={addressOf((lastViews.get(one) ?? one.views[0]).id)} aria-current={one !== group ? undefined : one.views.length > 1 ? "true" : "page"}>
          <Icon name={one.icon} />
          {t.groups[one.id]}
        </a>
      ))}
    </nav>
  );
}

/** Links to the views of a group, if it has several. */
export function Tabs({ group, view }: Props) {
  const t = labels.value.shell;
  if (group.views.length < 2) return null;
  return (
    <nav class="tabs" aria-label={`${t.navigation}: ${t.groups[group.id]}`}>
      {group.views.map((one) => (
        <a key={one.id} href={addressOf(one.id)} aria-current={one === view ? "page" : undefined}>
          {t.views[one.id]}
        </a>
      ))}
    </nav>
  );
}
