"""Helpers for tests of the page: servers as processes, screenshots for the documentation."""

from __future__ import annotations

import json
import re
import signal
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page, Route

AXE = Path(__file__).parents[2] / "web" / "node_modules" / "axe-core" / "axe.min.js"
"""Installed by `npm ci`."""
SCREENSHOTS = Path(__file__).parents[2] / "docs" / "pictures"

WITHOUT_TITLES = """
if (location.protocol === "http:" && !localStorage.getItem("llamado.preferences"))
  localStorage.setItem("llamado.preferences", '{"titles": false}');
"""
"""Titles by the model are requests that most tests do not expect."""


class Listener:
    """A server that records the beginning of each request. Connections without a request leave b""."""

    def __init__(self) -> None:
        seen: list[bytes] = []

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                seen.append(self.request.recv(1000))

        self.seen = seen
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        # Browsers open connections early, and close unused ones after a minute: nothing waits for their threads.
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def send(page: Page, text: str) -> None:
    """Send a message in the chat or the compare view."""
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


TRAP = """
globalThis.ran = [];
globalThis.pwn = (what) => globalThis.ran.push(String(what));
globalThis.alert = globalThis.pwn;
"""
"""Script of a page that records calls of `pwn` and `alert` in `ran`: those of hostile text."""


def make_chats(page: Page, *titles: str) -> None:
    """Make chats by sending one message in each."""
    from playwright.sync_api import expect

    for title in titles:
        page.get_by_role("link", name="New chat").click()
        send(page, title)
        page.get_by_role("heading", name=title, level=1).wait_for()
        page.get_by_role("button", name="Send", exact=True).wait_for()
        expect(page.locator("article.assistant .markdown")).to_have_text(["Answer to 1."])


def listed_chats(page: Page) -> Locator:
    """Return the links of the list of chats."""
    return page.locator(".chats-row a")


GROUPS = {"Complete": "Text", "Infill": "Text", "Live": "Server", "Cluster": "Server", "Lab": "Server"}
"""Views that are tabs of a group."""


def open_view(page: Page, name: str) -> None:
    """Open a view by the page's navigation."""
    for link in (GROUPS.get(name), name):
        if link is not None:
            page.get_by_role("navigation").get_by_role("link", name=link, exact=True).click()


def unfold(page: Page, *groups: str) -> None:
    """Unfold groups of the open settings."""
    for group in groups:
        details = page.locator(".settings details", has=page.locator("summary", has_text=group))
        details.wait_for()
        if details.get_attribute("open") is None:
            details.locator("summary").click()


def choose_action(page: Page, title: str, action: str) -> None:
    """Choose an action from the menu of a chat in the list."""
    page.get_by_role("link", name=title, exact=True).hover()
    page.get_by_role("button", name=f"Actions for {title}", exact=True).click()
    page.get_by_role("menuitem", name=action, exact=True).click()


def import_chat(page: Page, title: str, texts: list[str]) -> None:
    """Import a chat of alternating questions and answers, and open it."""
    rows = [
        {"id": str(n), "parent": str(n - 1) if n else None, "role": ("user", "assistant")[n % 2], "content": text}
        for n, text in enumerate(texts)
    ]
    conversation = {"title": title, "leaf": rows[-1]["id"], "updated": 1}
    exported = {
        "format": "llamado-conversations",
        "version": 1,
        "conversations": [{"conversation": conversation, "messages": rows}],
    }
    page.get_by_label("Chat file").set_input_files(
        {"name": "x.json", "mimeType": "application/json", "buffer": json.dumps(exported).encode()}
    )
    page.get_by_role("link", name=title).click()


def shorten_requests(page: Page) -> None:
    """Send only the last message of each chat request: the context of scripted models is short."""

    def shorten(route: Route) -> None:
        body = route.request.post_data_json
        route.continue_(post_data=json.dumps(body | {"messages": body["messages"][-1:]}))

    page.route("**/v1/chat/completions", shorten)


def assert_accessible(page: Page) -> None:
    """Fail if axe-core finds a violation in the view; does nothing if it is not installed."""
    if AXE.exists():
        page.evaluate(AXE.read_text())
        # A color that fades in has too little contrast for a moment.
        transitions = "document.getAnimations().filter((one) => one instanceof CSSTransition)"
        page.evaluate(f"Promise.allSettled({transitions}.map((one) => one.finished)).then(() => null)")
        assert [found["id"] for found in page.evaluate("axe.run()")["violations"]] == []


def take_picture(page: Page, name: str) -> None:
    """Save a screenshot for the documentation unless it exists; to renew it, delete the file and run the test."""
    path = SCREENSHOTS / f"{name}.png"
    if not path.exists():
        page.screenshot(path=path)
    assert path.stat().st_size < 150_000


def until(page: Page, condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait for a condition that no locator expresses. (The page forbids `wait_for_function`, which evaluates text.)"""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met"
        page.wait_for_timeout(50)


@contextmanager
def computing(page: Page) -> Iterator[list[float]]:
    """Measure the tasks of the page's main thread inside the `with`; the list is filled at its end.

    Milliseconds of processor time, which do not depend on the load of the machine.
    """
    browser = page.context.browser
    assert browser is not None
    tasks: list[float] = []
    browser.start_tracing(page=page, categories=["toplevel"])
    try:
        yield tasks
        # The last command returns before its task has ended; this task follows it.
        page.evaluate("() => new Promise((done) => setTimeout(done))")
    finally:
        events = json.loads(browser.stop_tracing())["traceEvents"]
    threads = [event for event in events if event["name"] == "thread_name"]
    main = {(one["pid"], one["tid"]) for one in threads if one["args"]["name"] == "CrRendererMain"}
    for event in events:
        if event["name"].endswith("RunTask") and (event["pid"], event["tid"]) in main:
            tasks.append(event.get("tdur", 0) / 1000)
    assert any(tasks), "the trace has no thread times"


@contextmanager
def calling(page: Page) -> Iterator[list[int]]:
    """Count the function calls of the page inside the `with`; the list is filled at its end.

    Unlike times, they do not depend on the machine.
    """
    session = page.context.new_cdp_session(page)
    session.send("Profiler.enable")
    session.send("Profiler.startPreciseCoverage", {"callCount": True, "detailed": False})
    calls: list[int] = []
    try:
        yield calls
        # The last command returns before its task has ended; this task follows it.
        page.evaluate("() => new Promise((done) => setTimeout(done))")
        scripts = session.send("Profiler.takePreciseCoverage")["result"]
        calls.append(sum(one["ranges"][0]["count"] for script in scripts for one in script["functions"]))
    finally:
        session.send("Profiler.stopPreciseCoverage")
        session.detach()


class serving:
    """`llamado serve` on a free port: yields its address, and ends it after the `with`.

    `words`: the log line that marks it as ready.
    """

    def __init__(self, folder: Path, *arguments: str, words: str = "all slots are idle") -> None:
        self._words = words
        self._log = folder / "log"
        self._arguments = arguments

    def __enter__(self) -> str:
        command = [sys.executable, "-m", "llamado", "serve", *self._arguments, "--port", "0"]
        with self._log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        return self.wait(lambda: self._address())

    def _address(self) -> str | None:
        text = self._log.read_text(errors="replace")
        found = re.search(r"listening on (http://127\.0\.0\.1:\d+)", text)
        return found[1] if found and self._words in text else None

    def wait(self, found: Callable[[], str | None], timeout: float = 120) -> str:
        deadline = time.monotonic() + timeout
        while (value := found()) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text(errors="replace")
            time.sleep(0.02)
        return value

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(120.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
