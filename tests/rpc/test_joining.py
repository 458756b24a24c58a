"""A worker that joins servers, announces itself, and leaves before it ends."""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import GUARD, until
from zeroconf import ServiceStateChange

from llamado.devices.cpu.device import CpuDevice
from llamado.rpc.discovery import Announcement, Discovery, read_share
from llamado.rpc.endpoint import Endpoint
from llamado.rpc.worker.join import JoinError, ServerMembership, join_body, server_url

LOOPBACK = ("127.0.0.1",)


class FakeServer(ThreadingHTTPServer):
    """Sends prepared responses to joining workers and records their requests."""

    def __init__(self) -> None:
        self.asked: queue.Queue[tuple[str, str, Any]] = queue.Queue()
        self.answers: list[tuple[int, Any]] = []
        super().__init__(("127.0.0.1", 0), _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        self.server.asked.put((self.path, self.headers["x-cluster-token"], body))
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    for name in ("_RETRY", "_AGAIN"):
        monkeypatch.setattr(f"llamado.rpc.worker.join.{name}", 0.01)
    with FakeServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def test_a_worker_joins_a_server_and_is_drained(server: FakeServer) -> None:
    loading = (503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})
    joined = (200, {"endpoint": "10.0.0.2:50052", "devices": [{"device": "RPC0", "holds": "layer 1", "why": ""}]})
    server.answers = [loading, loading, joined]
    body = {"port": 50052, "tls": False, "share": 2.0, "devices": []}
    membership = ServerMembership(f"http://127.0.0.1:{server.server_port}", "secret", body, None)
    membership.start()
    for _ in range(5):  # the request is repeated: the server may have restarted
        assert server.asked.get(timeout=60) == ("/cluster/join", "secret", body)
    membership.leave()
    membership.join(60)
    asked = []
    while not server.asked.empty():
        asked.append(server.asked.get())
    assert ("/cluster/drain", "secret", {"endpoint": "10.0.0.2:50052"}) in asked
    assert [path for path, *_ in asked].count("/cluster/drain") == 1


def test_a_worker_that_never_joined_sends_no_drain(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "llamado")
    server.answers = [(401, {"error": {"message": "no"}})]
    membership = ServerMembership(f"http://127.0.0.1:{server.server_port}", "wrong", {}, None)
    membership.start()
    server.asked.get(timeout=60)
    while not caplog.messages:
        time.sleep(0.01)
    membership.leave()
    membership.join(60)
    assert "401: no; retrying every 0.01 s" in caplog.messages[0]
    asked = []
    while not server.asked.empty():
        asked.append(server.asked.get()[0])
    assert "/cluster/drain" not in asked


@pytest.mark.slow
def test_the_body_of_a_join_request() -> None:
    device = CpuDevice(1)
    body = join_body(Endpoint("10.0.0.2", 50052, True), [device], 1.5)
    assert (body["endpoint"], body["share"]) == ("tls://10.0.0.2:50052", 1.5)
    (told,) = body["devices"]
    assert told["name"] == "CPU" and told["decode"] > 1e6 and told["free"] > 0
    for host in ("0.0.0.0", "::"):
        body = join_body(Endpoint(host, 7), [], 1.0)
        assert "endpoint" not in body and (body["port"], body["tls"]) == (7, False)
    device.close()


@pytest.mark.parametrize("text", ["", "ftp://x", "http://", "://x"])
def test_invalid_server_addresses(text: str) -> None:
    with pytest.raises(JoinError, match="expected HOST:PORT"):
        server_url(text)


def test_addresses() -> None:
    assert server_url("h:1") == "http://h:1"
    assert server_url("https://h:1/prefix/") == "https://h:1/prefix"


@pytest.mark.slow
def test_an_announced_worker_is_discovered_until_it_leaves(caplog: pytest.LogCaptureFixture) -> None:
    found: queue.Queue[tuple[str, float]] = queue.Queue()
    gone: queue.Queue[str] = queue.Queue()
    own = ("127.0.0.1:50123", "tls://127.0.0.1:50124")  # other tests' workers may be on the same machine
    discovery = Discovery(
        lambda *one: one[0] in own and found.put(one) is None, lambda one: one in own and gone.put(one), LOOPBACK
    )
    try:
        caplog.clear()
        plain = Announcement(Endpoint("127.0.0.1", 50123), 2.5, LOOPBACK)
        assert "127.0.0.1 is reached from this machine alone; -H 0.0.0.0" in caplog.text
        secure = Announcement(Endpoint("127.0.0.1", 50124, True), 1.0, LOOPBACK)
        assert {found.get(timeout=60), found.get(timeout=60)} == {
            ("127.0.0.1:50123", 2.5), ("tls://127.0.0.1:50124", 1.0)
        }  # fmt: skip
        let_go = threading.Event()
        leaving = threading.Thread(target=plain.end, args=(let_go.is_set,))
        leaving.start()
        assert gone.get(timeout=60) == "127.0.0.1:50123"
        assert leaving.is_alive(), "it waits until it is let go"
        let_go.set()
        leaving.join(60)
        assert not leaving.is_alive()
        secure.end(lambda: True)
        assert gone.get(timeout=60) == "tls://127.0.0.1:50124"
    finally:
        discovery.close()


@pytest.mark.parametrize(
    ("text", "share"),
    [("2.5", 2.5), ("0", 0.0), (None, 1.0), ("", 1.0), ("x", 1.0), ("inf", 1.0), ("nan", 1.0), ("-1", 1.0),
     ("1e300", 1.0)],
)  # fmt: skip
def test_announced_shares(text: str | None, share: float) -> None:
    assert read_share(text) == share


class FakeNetwork:
    """Services of a network that respond only to queries."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.answers = threading.Event()

    def get_service_info(self, *_: object, **__: object) -> Any:
        self.asked.release()
        assert self.answers.wait(GUARD)
        return SimpleNamespace(
            port=7, parsed_scoped_addresses=lambda: ["10.0.0.2"], decoded_properties={"share": "inf"}
        )

    def close(self) -> None:
        pass


def test_thousands_of_announcements_use_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    network, found, gone = FakeNetwork(), queue.Queue[tuple[str, float]](), queue.Queue[str]()
    monkeypatch.setattr("llamado.rpc.discovery._open", lambda interfaces: network)
    monkeypatch.setattr("zeroconf.ServiceBrowser", lambda *_, **__: SimpleNamespace(cancel=lambda: None))
    taken = False

    def find(endpoint: str, share: float) -> bool:
        found.put((endpoint, share))
        return taken

    discovery = Discovery(find, gone.put)
    before = threading.active_count()
    for n in range(1000):
        discovery._changed(None, "", f"w{n}", ServiceStateChange.Added)  # type: ignore[arg-type]
        discovery._changed(None, "", f"w{n}", ServiceStateChange.Added)  # type: ignore[arg-type]
    assert threading.active_count() <= before + 64
    network.answers.set()
    for _ in range(64):
        assert found.get(timeout=GUARD) == ("10.0.0.2:7", 1.0)
    until(lambda: not discovery._known, "rejected workers are not dropped")
    taken = True
    discovery._changed(None, "", "w", ServiceStateChange.Added)  # type: ignore[arg-type]
    assert found.get(timeout=GUARD)
    until(lambda: threading.active_count() == before)
    discovery._changed(None, "", "unknown", ServiceStateChange.Removed)  # type: ignore[arg-type]
    discovery._changed(None, "", "w", ServiceStateChange.Removed)  # type: ignore[arg-type]
    assert gone.get(timeout=GUARD) == "10.0.0.2:7" and gone.empty()
    discovery.close()
