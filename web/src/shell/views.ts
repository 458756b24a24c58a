// The views, in the order of the navigation. Each is loaded when it is first opened.
import type { ComponentType } from "preact";
import type { Catalogue } from "../text";
import type { IconName } from "../ui/Icon";

export interface View {
  id: keyof Catalogue["shell"]["views"];
  load: () => Promise<ComponentType>;
}

/** An entry of the navigation; several views are tabs below it. */
export interface ViewGroup {
  id: keyof Catalogue["shell"]["groups"];
  icon: IconName;
  views: [View, ...View[]];
}

export const GROUPS: [ViewGroup, ...ViewGroup[]] = [
  { id: "chat", icon: "chat", views: [{ id: "chat", load: async () => (await import("../chat/Chat")).Chat }] },
  { id: "compare", icon: "columns", views: [{ id: "compare", load: async () => (await import("../compare/Compare")).Compare }] },
  {
    id: "text",
    icon: "text",
    views: [
      { id: "complete", load: async () => (await import("../complete/Complete")).Complete },
      { id: "infill", load: async () => (await import("../complete/Infill")).Infill },
    ],
  },
  {
    id: "server",
    icon: "server",
    views: [
      { id: "live", load: async () => (await import("../live/Live")).Live },
      { id: "cluster", load: async () => (await import("../cluster/Cluster")).Cluster },
      { id: "lab", load: async () => (await import("../lab/Lab")).Lab },
    ],
  },
];

/** Return a view and its group; the chat for an unknown id. */
export function findView(id: string | undefined): { group: ViewGroup; view: View } {
  for (const group of GROUPS) {
    const view = group.views.find((one) => one.id === id);
    if (view) return { group, view };
  }
  return { group: GROUPS[0], view: GROUPS[0].views[0] };
}
