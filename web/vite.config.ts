import { createHash } from "node:crypto";
import { readFileSync, readdirSync, statSync, writeFileSync } from "node:fs";
import { join, relative } from "node:path";
import preact from "@preact/preset-vite";
import { defineConfig, type Plugin } from "vite";

const HERE = import.meta.dirname;
const BUILT = join(HERE, "../src/llamado/page/built");

// Sources of the built files. `tests/page/test_built.py` computes the same digest and fails if they are out of date.
const SOURCES = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts", "public", "src"];

function files(path: string): string[] {
  if (!statSync(path).isDirectory()) return [path];
  return readdirSync(path).flatMap((name) => files(join(path, name)));
}

function sourcesDigest(): Plugin {
  return {
    name: "sources-digest",
    apply: "build",
    closeBundle() {
      const digest = createHash("sha256");
      const paths = SOURCES.flatMap((name) => files(join(HERE, name))).map((path) => relative(HERE, path));
      for (const path of paths.sort()) {
        digest.update(`${path}\0`).update(readFileSync(join(HERE, path))).update("\0");
      }
      writeFileSync(join(BUILT, "sources.sha256"), `${digest.digest("hex")}\n`);
    },
  };
}

/** Files that are too large, or needed too rarely, to be kept for offline use before they are used. */
const LARGE = /pdf|diagrams/;

/** Fill in what the service worker keeps: a hash of all files, which changes with each build, and their names. */
function offlineFiles(): Plugin {
  return {
    name: "offline-files",
    apply: "build",
    enforce: "post",
    generateBundle(_, bundle) {
      const all = Object.entries(bundle).filter(([name]) => name !== "sw.js" && !name.endsWith(".map"));
      const digest = createHash("sha256").update(readFileSync(join(HERE, "index.html")));
      for (const [name, file] of all.sort()) digest.update(`${name}\0`).update(file.type === "chunk" ? file.code : file.source);
      const files = all.map(([name]) => name).filter((name) => name.startsWith("assets/") && !LARGE.test(name));
      const worker = bundle["sw.js"];
      if (worker?.type !== "chunk") throw new Error("the build has no service worker");
      worker.code = worker.code.replace("__OFFLINE__", JSON.stringify({ build: digest.digest("hex").slice(0, 16), files }));
    },
  };
}

export default defineConfig({
  base: "./", // the server may have a URL prefix (--api-prefix)
  plugins: [preact(), offlineFiles(), sourcesDigest()],
  build: {
    outDir: BUILT,
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the Content-Security-Policy forbids data: URLs for scripts and styles
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 3000,
    rolldownOptions: {
      input: { index: join(HERE, "index.html"), sw: join(HERE, "src/offline/serviceWorker.ts") },
      output: {
        // Browsers find the service worker by its name.
        entryFileNames: ({ name }) => (name === "sw" ? "sw.js" : "assets/[name]-[hash].js"),
        // One module of small parts that several views share compresses better than one each.
        codeSplitting: { groups: [{ name: "ui", test: /src\/ui\/.*\.tsx?$/ }] },
      },
    },
  },
  server: {
    // `npm run dev` next to a server on the default port
    proxy: Object.fromEntries(
      ["/v1", "/health", "/props", "/slots", "/models", "/metrics", "/completion", "/infill", "/tokenize", "/cluster", "/live", "/lab", "/tools"].map(
        (path) => [path, "http://127.0.0.1:8080"],
      ),
    ),
  },
});
