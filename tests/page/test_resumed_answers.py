"""Answers go on after a reload, a crash of the tab, or a lost connection."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsing import choose_action, send, unfold, until
from playwright.sync_api import BrowserContext, Error, Locator, Page, Route, expect
from scripted import ScriptedEngine, scripted_server

from llamado.tools.settings import ToolSettings

pytestmark = pytest.mark.browser

TEXT = "Größe 😀: der Ebro entspringt in Kantabrien, fließt nach Südosten, und mündet ins Mittelmeer."
TOOL_TEMPLATE = """
{%- if tools %}<tools>{{ tools | tojson }}</tools> <tool_call>{"name": N, "arguments": A}</tool_call>{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
  {{- '\n' ~ (m.content or '') }}
  {%- for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor -%}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
"""
CALL = '<tool_call>\n{"name": "write_file", "arguments": {"path": "x.txt", "content": "seven"}}\n</tool_call>'


CUT_CALLS = """async () => {
  const opened = indexedDB.open("llamado");
  await new Promise((done) => (opened.onsuccess = done));
  const all = opened.result.transaction("messages").objectStore("messages").getAll();
  await new Promise((done) => (all.onsuccess = done));
  opened.result.close();
  return all.result.flatMap((one) => one.toolCalls ?? []).map((one) => one.arguments);
}"""

STREAM = re.compile("/v1/streams?[/?]")

END_ANSWERS = """async () => {
  const opened = indexedDB.open("llamado");
  await new Promise((done) => (opened.onsuccess = done));
  const store = opened.result.transaction("messages", "readwrite").objectStore("messages");
  const all = store.getAll();
  await new Promise((done) => (all.onsuccess = done));
  const puts = all.result.filter((one) => one.ending).map((one) => store.put({ ...one, ending: "stop" }));
  await Promise.all(puts.map((one) => new Promise((done) => (one.onsuccess = done))));
  opened.result.close();
}"""


class Gate:
    """Holds the engine after `pieces` pieces of each answer until it is opened."""

    def __init__(self, engine: ScriptedEngine, pieces: int = 3) -> None:
        self._open = threading.Event()
        self._pieces = pieces
        self._sent = threading.local()
        engine.pause = self._pause

    def _pause(self) -> None:
        self._sent.n = getattr(self._sent, "n", 0) + 1  # each answer has a thread
        if self._sent.n >= self._pieces:
            self._open.wait(300)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(engine: ScriptedEngine) -> Iterator[Gate]:
    engine.say, engine.piece = TEXT, 8
    found = Gate(engine)
    yield found
    found.open()


class Relay:
    """Forwards connections to a server, and cuts them on request."""

    def __init__(self, address: str) -> None:
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))
        self._open: set[socket.socket] = set()
        self._port = 0
        self.open()
        self.address = f"http://127.0.0.1:{self._port}"

    def open(self) -> None:
        """Accept connections, on the same port as before."""
        self._server = socket.create_server(("127.0.0.1", self._port))
        self._port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(self._target)
                self._open |= {client, server}
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        """Close all connections."""
        for one in list(self._open):
            self._open.discard(one)
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._server.close()
        self.cut()


def answers(page: Page) -> Locator:
    return page.locator("article.assistant .markdown")


def begun(page: Page, text: str = TEXT[:24], n: int = 1) -> None:
    """Wait until `n` answers are shown as far as the gate lets them."""
    expect(answers(page)).to_have_text([text] * n)


def complete(page: Page, *texts: str) -> None:
    expect(answers(page)).to_have_text([*texts])
    page.get_by_role("button", name="Send", exact=True).wait_for()
    expect(page.get_by_text("Interrupted")).to_have_count(0)


def crash(page: Page) -> None:
    with page.expect_event("crash"), contextlib.suppress(Error):
        page.goto("chrome://crash")


def notes(page: Page) -> int:
    """Return the number of answers that the page has noted as open."""
    found: int = page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('llamado.answer.')).length")
    return found


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_reload_resumes_the_answer(chat: Page, engine: ScriptedEngine, gate: Gate, opened: str) -> None:
    """`before`: it is complete on the server when the page is back."""
    send(chat, "Go")
    begun(chat)
    if opened == "before":
        chat.route("**/health", lambda route: route.fulfill(status=503, json={"error": {"message": "not yet"}}))
        chat.expected_errors.append("503")  # type: ignore[attr-defined]
    chat.reload()
    if opened == "before":
        gate.open()
        until(chat, lambda: not engine.busy)
        chat.unroute("**/health")
    else:
        chat.get_by_role("button", name="Stop").wait_for()
        begun(chat)
        gate.open()
    complete(chat, TEXT)
    assert len(engine.requests) == 1 and not engine.cancelled and notes(chat) == 0
    chat.reload()
    complete(chat, TEXT)


def test_a_new_tab_resumes_the_answer_of_a_crashed_one(
    chat: Page, engine: ScriptedEngine, gate: Gate, context: BrowserContext
) -> None:
    send(chat, "Go")
    begun(chat)
    address = chat.url
    crash(chat)
    page = context.new_page()
    page.goto(address)
    page.get_by_role("button", name="Stop").wait_for()
    gate.open()
    complete(page, TEXT)
    assert len(engine.requests) == 1 and notes(page) == 0


def test_one_of_several_tabs_resumes_the_answer(
    chat: Page, engine: ScriptedEngine, gate: Gate, context: BrowserContext
) -> None:
    send(chat, "Go")
    begun(chat)
    others = [context.new_page() for _ in range(2)]
    requests: list[str] = []
    for page in others:
        page.on("request", lambda request: requests.append(request.url))
        page.goto(chat.url)
        begun(page)
    crash(chat)
    until(others[0], lambda: any("v1/stream?" in url for url in requests))
    gate.open()
    for page in others:
        expect(answers(page)).to_have_text([TEXT])
        expect(page.locator("article.streaming")).to_have_count(0)
        expect(page.get_by_text("Interrupted")).to_have_count(0)
    assert sum("v1/stream?" in url for url in requests) == 1 and len(engine.requests) == 1


def test_a_lost_connection_is_resumed(page: Page, engine: ScriptedEngine, gate: Gate) -> None:
    """The connection is lost after some text, or before the first."""
    page.expected_errors.append("net::ERR_")  # type: ignore[attr-defined]
    with scripted_server(engine) as address:
        relay = Relay(address)
        page.goto(relay.address)
        send(page, "Go")
        begun(page)
        relay.cut()
        gate.open()
        complete(page, TEXT)
        waiting = Gate(engine, 1)
        engine.piece = 10_000
        send(page, "And again")
        until(page, lambda: len(engine.requests) == 2)
        relay.cut()
        waiting.open()
        complete(page, TEXT, TEXT)
        assert len(engine.requests) == 2 and notes(page) == 0
        relay.close()


def test_stop_ends_the_generation(chat: Page, engine: ScriptedEngine, gate: Gate) -> None:
    """*Stop* works in the tab that requested the answer, and after a reload."""
    for n in (1, 2):
        send(chat, "Go")
        begun(chat, n=n)
        if n == 2:
            chat.reload()
        chat.get_by_role("button", name="Stop").click()
        until(chat, lambda n=n: len(engine.cancelled) == n)  # type: ignore[misc]
        begun(chat, n=n)
        chat.get_by_role("button", name="Send", exact=True).wait_for()
    assert notes(chat) == 0


def test_answers_side_by_side_are_resumed(chat: Page, engine: ScriptedEngine, gate: Gate) -> None:
    chat.get_by_role("button", name="Settings").click()
    unfold(chat, "All chats")
    chat.get_by_label("Answers to each question").select_option("3")
    chat.get_by_role("button", name="Close settings").click()
    send(chat, "Go")
    begun(chat, n=3)
    chat.reload()
    begun(chat, n=3)
    until(chat, lambda: chat.locator("article.streaming").count() == 3)
    gate.open()
    expect(answers(chat)).to_have_text([TEXT] * 3)
    expect(chat.get_by_text("Interrupted")).to_have_count(0)
    assert len(engine.requests) == 3


def test_a_continued_answer_is_resumed(chat: Page, engine: ScriptedEngine, gate: Gate) -> None:
    send(chat, "Go")
    begun(chat)
    chat.get_by_role("button", name="Stop").click()
    chat.get_by_role("button", name="Continue").click()
    expect(answers(chat)).to_have_text([TEXT[:24] * 2])
    chat.reload()
    gate.open()
    complete(chat, TEXT[:24] + TEXT)


def test_a_continuation_without_an_event_is_resumed(
    chat: Page, engine: ScriptedEngine, gate: Gate, context: BrowserContext
) -> None:
    send(chat, "Go")
    begun(chat)
    chat.get_by_role("button", name="Stop").click()
    first = threading.Event()
    engine.say = lambda _: TEXT if first.wait(300) else ""
    chat.get_by_role("button", name="Continue").click()
    until(chat, lambda: len(engine.requests) == 2)
    address = chat.url
    crash(chat)
    page = context.new_page()
    page.goto(address)
    page.get_by_role("button", name="Stop").wait_for()
    first.set()
    gate.open()
    complete(page, TEXT[:24] + TEXT)


def test_tool_calls_run_once(page: Page, tmp_path: Path) -> None:
    """A call that was cut by the reload is whole afterwards."""
    engine = ScriptedEngine(lambda prompt: "Done." if "<|im_start|>tool" in prompt else CALL, piece=30)
    gate = Gate(engine, 2)
    settings = ToolSettings(builtin=("write_file",), folder=str(tmp_path))
    with scripted_server(engine, source=TOOL_TEMPLATE, tools=settings) as address:
        ran: list[str] = []
        page.on("request", lambda request: ran.append(request.url) if request.method == "POST" else None)
        page.goto(address)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("write_file", exact=True).check()
        page.get_by_label("Run write_file without asking").check()
        page.get_by_role("button", name="Close settings").click()
        send(page, "Write it")
        until(page, lambda: any(page.evaluate(CUT_CALLS)))
        (cut,) = page.evaluate(CUT_CALLS)
        assert not cut.endswith("}")
        page.reload()
        page.get_by_role("button", name="Stop").wait_for()
        gate.open()
        page.get_by_text("Done.").wait_for()
        page.get_by_role("button", name="Send", exact=True).wait_for()
        assert (tmp_path / "x.txt").read_text() == "seven"
        assert sum(url.endswith("/tools") for url in ran) == 1 and len(engine.requests) == 2
        page.reload()
        page.get_by_text("Done.").wait_for()
        assert sum(url.endswith("/tools") for url in ran) == 1
        gate.open()


def test_the_answer_of_a_deleted_chat_is_stopped(
    chat: Page, engine: ScriptedEngine, gate: Gate, context: BrowserContext
) -> None:
    """Another tab deletes it after the tab that requested it has crashed."""
    send(chat, "Go")
    begun(chat)
    address = chat.url.partition("#")[0]
    crash(chat)
    other = context.new_page()
    other.route("**/health", lambda route: route.abort())
    other.goto(address)
    choose_action(other, "Go", "Delete")
    expect(other.get_by_role("link", name="Go", exact=True)).to_have_count(0)
    other.unroute("**/health")
    until(other, lambda: bool(engine.cancelled))
    until(other, lambda: notes(other) == 0)


def test_an_answer_is_resumed_when_its_model_is_loaded(chat: Page, engine: ScriptedEngine, gate: Gate) -> None:
    """While a router loads a model its streams have no bytes, and cannot be read."""
    send(chat, "Go")
    begun(chat)
    lookups: list[str] = []
    waits = threading.Event()

    def answer(route: Route) -> None:
        (id,) = route.request.post_data_json["conversation_ids"]
        lookups.append(id)
        if waits.is_set():
            route.continue_()
        else:
            route.fulfill(json=[{"conversation_id": id, "is_done": False, "total_bytes": 0}])

    chat.route("**/v1/streams/lookup", answer)
    requests: list[str] = []
    chat.on("request", lambda request: requests.append(request.url))
    chat.reload()
    until(chat, lambda: len(lookups) > 2)
    assert not any("v1/stream?" in url for url in requests)
    waits.set()
    gate.open()
    complete(chat, TEXT)


def test_without_a_stream_the_answer_stays_interrupted(chat: Page, engine: ScriptedEngine, gate: Gate) -> None:
    """The server was restarted, for example. The page learns it by a lookup, which leaves no error in the console."""
    send(chat, "Go")
    begun(chat)
    chat.route("**/v1/streams/lookup", lambda route: route.fulfill(json=[]))
    chat.reload()
    chat.get_by_text("Interrupted").wait_for()
    until(chat, lambda: notes(chat) == 0)
    begun(chat)


def test_the_stream_of_an_answer_that_has_changed_is_stopped(
    chat: Page, engine: ScriptedEngine, gate: Gate, context: BrowserContext
) -> None:
    """For example, another device has written the message again."""
    send(chat, "Go")
    begun(chat)
    address = chat.url
    crash(chat)
    other = context.new_page()
    other.route("**/health", lambda route: route.abort())
    other.goto(address)
    expect(answers(other)).to_have_count(1)
    other.evaluate(END_ANSWERS)
    other.unroute("**/health")
    until(other, lambda: bool(engine.cancelled))
    until(other, lambda: notes(other) == 0)
    assert len(engine.requests) == 1


def test_a_continuation_reads_no_earlier_stream(chat: Page, engine: ScriptedEngine) -> None:
    """Its request is lost, and the server still has the stream of the complete answer."""
    chat.expected_errors.append("ERR_")  # type: ignore[attr-defined]
    engine.say = TEXT
    send(chat, "Go")
    complete(chat, TEXT)
    chat.route("**/v1/chat/completions", lambda route: route.abort())
    chat.get_by_role("button", name="Continue").click()
    expect(chat.locator("article.assistant .notice")).to_contain_text("Cannot reach the server")
    expect(answers(chat)).to_have_text([TEXT])


def test_an_answer_is_resumed_after_a_long_outage(page: Page, engine: ScriptedEngine, gate: Gate) -> None:
    page.expected_errors.append("net::ERR_")  # type: ignore[attr-defined]

    def passes(text: str) -> bool:
        page.clock.fast_forward(2000)
        return page.get_by_text(text).count() > 0

    with scripted_server(engine) as address:
        relay = Relay(address)
        page.clock.install()
        page.goto(relay.address)
        send(page, "Go")
        begun(page)
        relay.close()
        until(page, lambda: passes("Interrupted"))
        assert notes(page) == 1
        gate.open()
        relay.open()
        until(page, lambda: passes(TEXT))
        complete(page, TEXT)
        assert len(engine.requests) == 1 and notes(page) == 0
        relay.close()


def test_a_resume_that_fails_is_tried_again(chat: Page, engine: ScriptedEngine, gate: Gate) -> None:
    chat.expected_errors.append("ERR_")  # type: ignore[attr-defined]
    send(chat, "Go")
    begun(chat)
    chat.route("**/v1/streams/lookup", lambda route: route.abort(), times=2)
    chat.reload()
    chat.get_by_role("button", name="Stop").wait_for()
    gate.open()
    complete(chat, TEXT)


def test_a_stop_without_the_server_is_made_up_for(chat: Page, engine: ScriptedEngine, gate: Gate) -> None:
    chat.expected_errors.append("ERR_")  # type: ignore[attr-defined]
    send(chat, "Go")
    begun(chat)
    chat.route(STREAM, lambda route: route.abort())
    with chat.expect_event("requestfailed", lambda request: request.method == "DELETE"):
        chat.get_by_role("button", name="Stop").click()
    chat.get_by_text("Stopped.").wait_for()
    assert notes(chat) == 1 and not engine.cancelled
    chat.unroute(STREAM)
    chat.reload()
    until(chat, lambda: bool(engine.cancelled))
    until(chat, lambda: notes(chat) == 0)
    begun(chat)


def test_a_server_without_streams_gets_no_further_requests(chat: Page, engine: ScriptedEngine, gate: Gate) -> None:
    chat.expected_errors.append("404")  # type: ignore[attr-defined]
    requests: list[str] = []

    def answer(route: Route) -> None:
        requests.append(route.request.url)
        route.fulfill(status=404)

    send(chat, "Go")
    begun(chat)
    chat.route(STREAM, answer)
    chat.reload()
    chat.get_by_text("Interrupted").wait_for()
    until(chat, lambda: notes(chat) == 0)
    send(chat, "And again")
    begun(chat, n=2)
    chat.get_by_role("button", name="Stop").click()
    chat.get_by_text("Stopped.").wait_for()
    until(chat, lambda: notes(chat) == 0)
    assert len(requests) == 1


def test_without_locks_only_the_tab_itself_resumes_its_answer(
    page: Page, engine: ScriptedEngine, gate: Gate, context: BrowserContext
) -> None:
    """A duplicated tab gets a copy of the storage, and must not resume the answer."""
    context.add_init_script("Object.defineProperty(Navigator.prototype, 'locks', { value: undefined });")
    with scripted_server(engine) as address:
        page.goto(address)
        send(page, "Go")
        begun(page)
        requests: list[str] = []
        context.on("request", lambda request: requests.append(request.url))
        with page.expect_popup() as popup:
            page.evaluate("void open(location.href)")
        copy = popup.value
        begun(copy)
        until(copy, lambda: any(url.endswith("/props") for url in requests))
        copy.wait_for_timeout(1000)
        assert not any("/v1/stream" in url for url in requests)
        page.reload()
        page.get_by_role("button", name="Stop").wait_for()
        gate.open()
        complete(page, TEXT)
        assert len(engine.requests) == 1
