import type { ComponentType } from "preact";
import { useEffect, useState } from "preact/hooks";
import { health, props, start } from "../api/server";
import { Icon } from "../ui/Icon";
import { KeyDialog } from "./KeyDialog";
import { address, route } from "./route";
import { theme, type Theme } from "./theme";
import { VIEWS, type View } from "./views";

const NEXT: Record<Theme, Theme> = { system: "light", light: "dark", dark: "system" };

function Status() {
  const now = health.value;
  const words = {
    ready: props.value.model_alias ?? "ready",
    loading: now.state === "loading" ? `loading: ${now.stage || "…"} ${Math.round(now.progress * 100)}%` : "",
    fault: now.state === "fault" ? now.why : "",
    unreachable: "the server cannot be reached",
  }[now.state];
  return (
    <span class={`status ${now.state}`} role="status">
      <span class="dot" aria-hidden="true" /> {words}
    </span>
  );
}

function Shown({ view }: { view: View }) {
  const [loaded, setLoaded] = useState<{ id: string; component: ComponentType } | null>(null);
  const [failure, setFailure] = useState("");
  useEffect(() => {
    let wanted = true;
    setFailure("");
    view.load().then(
      (component) => wanted && setLoaded({ id: view.id, component }),
      () => wanted && setFailure("This view could not be loaded: the server may have ended."),
    );
    return () => {
      wanted = false;
    };
  }, [view]);
  if (failure) return <p class="notice">{failure}</p>;
  if (loaded?.id !== view.id) return null;
  const Component = loaded.component;
  return <Component />;
}

export function App() {
  useEffect(start, []);
  const view = VIEWS.find((one) => one.id === route.value[0]) ?? VIEWS[0]!;
  useEffect(() => {
    document.title = `${view.title} · llamado`;
  }, [view]);
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to the content
      </a>
      <header class="bar">
        <strong class="brand">llamado</strong>
        <nav aria-label="Views">
          {VIEWS.map((one) => (
            <a key={one.id} href={address(one.id)} aria-current={one === view ? "page" : undefined}>
              {one.title}
            </a>
          ))}
        </nav>
        <Status />
        <button
          class="quiet"
          type="button"
          title={`Colours: ${theme.value}`}
          aria-label={`Colours: ${theme.value}`}
          onClick={() => (theme.value = NEXT[theme.value])}
        >
          <Icon name={({ system: "contrast", light: "sun", dark: "moon" } as const)[theme.value]} />
        </button>
      </header>
      <main id="main" tabIndex={-1}>
        <Shown view={view} />
      </main>
      <KeyDialog />
    </>
  );
}
