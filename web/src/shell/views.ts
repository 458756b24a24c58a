// The views, in the order of the navigation. Each is loaded when it is first opened.
import type { ComponentType } from "preact";
import type { Catalogue } from "../text";

export interface View {
  id: keyof Catalogue["shell"]["views"];
  load: () => Promise<ComponentType>;
}

export const VIEWS: View[] = [
  { id: "chat", load: async () => (await import("../chat/Chat")).Chat },
  { id: "compare", load: async () => (await import("../compare/Compare")).Compare },
  { id: "complete", load: async () => (await import("../complete/Complete")).Complete },
  { id: "infill", load: async () => (await import("../complete/Infill")).Infill },
  { id: "live", load: async () => (await import("../live/Live")).Live },
  { id: "cluster", load: async () => (await import("../cluster/Cluster")).Cluster },
  { id: "lab", load: async () => (await import("../lab/Lab")).Lab },
];
