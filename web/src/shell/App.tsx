import type { ComponentType } from "preact";
import { useEffect, useState } from "preact/hooks";
import { checkHealth, health, isRouter, models, props, watchServer } from "../api/server";
import { displayText } from "../markdown/displayText";
import { labels } from "../text";
import { IconButton } from "../ui/IconButton";
import { Lazy } from "../ui/Lazy";
import { Notices } from "../ui/Notices";
import { KeyDialog } from "./KeyDialog";
import { LanguagePicker } from "./LanguagePicker";
import { Logo } from "./Logo";
import { Navigation, Tabs } from "./Navigation";
import { route } from "./route";
import { isHelpOpen, useShortcuts } from "./shortcuts";
import { theme, type Theme } from "./theme";
import { viewTitle } from "./title";
import { findView, type View } from "./views";

const NEXT: Record<Theme, Theme> = { system: "light", light: "dark", dark: "system" };

function modelSummary(): string {
  const t = labels.value.shell;
  if (!isRouter.value) return props.value.model_alias ?? t.ready;
  const loaded = models.value.filter((one) => one.status?.value === "loaded").length;
  return t.modelsLoaded(loaded, models.value.length);
}

function Status() {
  const t = labels.value.shell;
  const now = health.value;
  const words = {
    ready: modelSummary(),
    loading: now.state === "loading" ? t.loadingModel(now.model, Math.round(now.progress * 100)) : "",
    fault: now.state === "fault" ? now.why : "",
    unreachable: t.unreachable,
  }[now.state];
  return (
    <span class={`status ${now.state}`} role="status" title={words}>
      <span class="dot" aria-hidden="true" />
      <span class="words">{displayText(words)}</span>
    </span>
  );
}

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 8000;

/** Shown if a view's files cannot be fetched. */
function ViewLoadError() {
  const t = labels.value.shell;
  if (health.value.state !== "ready") return <p class="notice">{t.viewUnreachable}</p>;
  return (
    <div class="notice">
      <p>{t.viewNotLoaded}</p>
      <button type="button" onClick={() => location.reload()}>
        {t.reload}
      </button>
    </div>
  );
}

function ViewHost({ view }: { view: View }) {
  const [loaded, setLoaded] = useState<{ id: string; component: ComponentType } | null>(null);
  const [failed, setFailed] = useState(false);
  useEffect(() => {
    let isCurrent = true;
    let wait = FIRST_RETRY_MS;
    let timer: ReturnType<typeof setTimeout>;
    function load() {
      view.load().then(
        (component) => {
          if (!isCurrent) return;
          setFailed(false);
          setLoaded({ id: view.id, component });
        },
        async () => {
          await checkHealth();
          if (!isCurrent) return;
          setFailed(true);
          timer = setTimeout(load, wait);
          wait = Math.min(2 * wait, LAST_RETRY_MS);
        },
      );
    }
    setFailed(false);
    load();
    return () => {
      isCurrent = false;
      clearTimeout(timer);
    };
  }, [view]);
  if (failed) return <ViewLoadError />;
  if (loaded?.id !== view.id) return null;
  const Component = loaded.component;
  return <Component />;
}

const loadShortcuts = async () => (await import("./ShortcutSheet")).ShortcutSheet;

export function App() {
  const t = labels.value.shell;
  useEffect(watchServer, []);
  const { group, view } = findView(route.value[0]);
  useEffect(() => {
    viewTitle.value = t.views[view.id];
  }, [view, t]);
  useShortcuts({ "?": () => (isHelpOpen.value = true) });
  return (
    <>
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        {t.skip}
      </a>
      <header class="bar">
        <strong class="brand">
          <Logo /> <span>llamado</span>
        </strong>
        <Navigation group={group} view={view} />
        <Status />
        <IconButton
          icon={({ system: "contrast", light: "sun", dark: "moon" } as const)[theme.value]}
          label={t.colors[theme.value]}
          onClick={() => (theme.value = NEXT[theme.value])}
        />
        <LanguagePicker />
      </header>
      <Tabs group={group} view={view} />
      <main id="main" tabIndex={-1}>
        <ViewHost view={view} />
      </main>
      <KeyDialog />
      {isHelpOpen.value && <Lazy load={loadShortcuts} />}
      <Notices />
    </>
  );
}
