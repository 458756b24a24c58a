// Registration of the service worker. Browsers allow one on localhost and over HTTPS; elsewhere the page works without.
import { scriptUrl } from "../shell/trusted";

export function registerServiceWorker(): void {
  const container = navigator.serviceWorker as ServiceWorkerContainer | undefined;
  if (!import.meta.env.PROD || !container) return;
  // The files that it stores should not delay the first view. A browser that forbids it, for example in a private window,
  // changes nothing for the page.
  addEventListener("load", () => void container.register(scriptUrl("./sw.js")).catch(() => undefined));
}
