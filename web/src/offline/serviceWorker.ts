// Service worker: opens the page without the server. It answers requests for the page's own files, and never for the
// API. The page itself comes from the server whenever that can be reached, so that no upgrade is missed; files in
// `assets/` never change, because their names are made from their contents.

export interface Offline {
  /** Hash of the build. */
  build: string;
  /** Files to keep for offline use. */
  files: string[];
}

/** Filled in by the build (vite.config.ts). */
declare const __OFFLINE__: Offline;
const { build, files } = __OFFLINE__;

const worker = self as unknown as ServiceWorkerGlobalScope;
const scope = worker.registration.scope;
const prefix = `llamado ${scope} `;
const cacheName = prefix + build;
const start = new URL("./", scope).href;
const assets = new URL("./assets/", scope).href;
/** Statuses of a proxy whose server cannot be reached. */
const PROXY_ERRORS = [502, 503, 504];
/** The server's `Vary` does not matter here: each file is stored in one form. */
const ANY_FORM = { ignoreVary: true };

worker.addEventListener("install", (event) => {
  event.waitUntil(
    caches
      .open(cacheName)
      .then((cache) => cache.addAll([start, ...files.map((file) => new URL(file, scope).href)].map((url) => new Request(url, { cache: "no-cache" }))))
      .then(() => worker.skipWaiting()),
  );
});

worker.addEventListener("activate", (event) => {
  event.waitUntil(
    caches
      .keys()
      .then((all) => Promise.all(all.filter((one) => one.startsWith(prefix) && one !== cacheName).map((one) => caches.delete(one))))
      .then(() => worker.registration.navigationPreload?.enable())
      .then(() => worker.clients.claim()),
  );
});

worker.addEventListener("fetch", (event) => {
  const { request } = event;
  const url = request.url.replace(/[?#].*$/, "");
  if (request.method !== "GET") return;
  if (request.mode === "navigate" && (url === start || url === `${start}index.html`)) event.respondWith(openPage(event));
  else if (url.startsWith(assets)) event.respondWith(readAsset(request));
});

/** Return the server's page, or the stored one if the server cannot be reached. */
async function openPage(event: FetchEvent): Promise<Response> {
  const stored = () => caches.open(cacheName).then((cache) => cache.match(start, ANY_FORM));
  try {
    const found = ((await event.preloadResponse) as Response | undefined) ?? (await fetch(event.request));
    return PROXY_ERRORS.includes(found.status) ? ((await stored()) ?? found) : found;
  } catch (error) {
    const found = await stored();
    if (!found) throw error;
    return found;
  }
}

/** Return a stored file, or the server's, which is kept for later. */
async function readAsset(request: Request): Promise<Response> {
  const cache = await caches.open(cacheName);
  const stored = await cache.match(request, ANY_FORM);
  if (stored) return stored;
  const found = await fetch(request);
  if (found.ok) await cache.put(request, found.clone());
  return found;
}
