// The views, in the order of the navigation. Each is loaded when it is first shown.
import type { ComponentType } from "preact";

export interface View {
  id: string;
  title: string;
  load: () => Promise<ComponentType>;
}

export const VIEWS: View[] = [
  { id: "chat", title: "Chat", load: async () => (await import("../chat/Chat")).Chat },
];
