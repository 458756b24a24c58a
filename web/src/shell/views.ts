// The views, in the order of the navigation. Each is loaded when it is first opened.
import type { ComponentType } from "preact";

export interface View {
  id: string;
  title: string;
  load: () => Promise<ComponentType>;
}

export const VIEWS: View[] = [
  { id: "chat", title: "Chat", load: async () => (await import("../chat/Chat")).Chat },
  { id: "compare", title: "Compare", load: async () => (await import("../compare/Compare")).Compare },
  { id: "complete", title: "Complete", load: async () => (await import("../complete/Complete")).Complete },
  { id: "infill", title: "Infill", load: async () => (await import("../complete/Infill")).Infill },
  { id: "live", title: "Live", load: async () => (await import("../live/Live")).Live },
  { id: "cluster", title: "Cluster", load: async () => (await import("../cluster/Cluster")).Cluster },
  { id: "lab", title: "Lab", load: async () => (await import("../lab/Lab")).Lab },
];
