// Runs in the frame that draws diagrams (diagrams.ts), as an inline script with a nonce. The page sends the library, then
// one diagram after another.
const { nonce } = document.currentScript;

/** Run the library. Its text is never parsed as HTML. */
function load(library) {
  const script = document.createElement("script");
  script.nonce = nonce;
  script.textContent = library;
  document.head.append(script);
}

/** Return a diagram as an SVG document of its own size, and its title. Throws an Error for invalid code. */
async function draw({ code, isDark }) {
  mermaid.initialize({
    startOnLoad: false,
    securityLevel: "strict",
    htmlLabels: false,
    flowchart: { htmlLabels: false },
    class: { htmlLabels: false },
    suppressErrorRendering: true,
    maxTextSize: 20_000,
    theme: isDark ? "dark" : "default",
    fontFamily: "system-ui, sans-serif",
    // What the code of a diagram cannot change.
    secure: ["secure", "securityLevel", "startOnLoad", "maxTextSize", "suppressErrorRendering", "maxEdges", "htmlLabels", "themeCSS", "dompurifyConfig"],
  });
  const { svg } = await mermaid.render("diagram", code);
  const root = new DOMParser().parseFromString(svg, "text/html").querySelector("svg");
  const { width, height } = root.viewBox.baseVal;
  root.setAttribute("width", width);
  root.setAttribute("height", height);
  root.style.maxWidth = "none";
  return { svg: new XMLSerializer().serializeToString(root), title: root.querySelector(":scope > title")?.textContent ?? "" };
}

addEventListener("message", function start({ source, data, ports: [port] }) {
  if (source !== top) return;
  removeEventListener("message", start);
  load(data);
  port.onmessage = async ({ data }) => {
    try {
      port.postMessage(await draw(data));
    } catch (error) {
      port.postMessage({ error: String(error) });
    }
  };
});
top.postMessage("ready", "*");
