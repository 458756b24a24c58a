"""Address updates: requests to gateways and servers after a service has moved, and their results."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llamado.cluster.address_updates import send_address
from llamado.cluster.services import ADMIN_KEY, CLUSTER_TOKEN, Service, ServiceRole


class RecordingServer(ThreadingHTTPServer):
    """Records its requests. Answers with the status in `statuses` for a method and path, by default 200."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()
        self.statuses: dict[str, int] = {}
        super().__init__(("127.0.0.1", 0), _Handler)

    def service(self, role: ServiceRole) -> Service:
        environment = {ADMIN_KEY: "admin", CLUSTER_TOKEN: "token"}
        return Service(name="x", role=role, host="127.0.0.1", port=self.server_port, environment=environment)


class _Handler(BaseHTTPRequestHandler):
    server: RecordingServer

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        path = self.path.partition("?")[0]
        self.server.requests.append((self.command, self.path, json.loads(self.rfile.read(length)) if length else None))
        self.server.keys.add(self.headers.get("Authorization") or self.headers.get("X-Cluster-Token"))
        self.send_response(self.server.statuses.get(f"{self.command} {path}", 200))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def peer() -> Iterator[RecordingServer]:
    with RecordingServer() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def test_a_gateway_replaces_the_old_replica(peer: RecordingServer) -> None:
    gateway = peer.service(ServiceRole.GATEWAY)
    assert asyncio.run(send_address(gateway, "http://a:1/x", "http://b:2/x"))
    assert peer.requests == [
        ("DELETE", "/gateway/replicas?replica=http%3A%2F%2Fa%3A1%2Fx", None),
        ("POST", "/gateway/replicas", {"url": "http://b:2/x"}),
    ]
    assert peer.keys == {"Bearer admin"}
    peer.requests.clear()
    assert asyncio.run(send_address(gateway, None, "http://b:2"))
    assert [method for method, *_ in peer.requests] == ["POST"]
    peer.statuses["DELETE /gateway/replicas"] = 404
    assert asyncio.run(send_address(gateway, "http://a:1", "http://b:2")), "an unknown old replica is no error"
    peer.statuses["POST /gateway/replicas"] = 500
    assert not asyncio.run(send_address(gateway, None, "http://b:2"))


def test_a_server_drains_the_old_worker_before_the_new_one_joins(peer: RecordingServer) -> None:
    server = peer.service(ServiceRole.SERVER)
    peer.statuses["POST /cluster/drain"] = 404
    assert asyncio.run(send_address(server, "a:1", "b:2"))
    assert peer.requests == [
        ("POST", "/cluster/drain", {"endpoint": "a:1"}),
        ("POST", "/cluster/join", {"endpoint": "b:2"}),
    ]
    assert peer.keys == {"token"}
    peer.requests.clear()
    peer.statuses["POST /cluster/drain"] = 503  # no memory for its layers
    assert not asyncio.run(send_address(server, "a:1", "b:2"))
    assert len(peer.requests) == 1
    peer.statuses["POST /cluster/join"] = 503
    assert not asyncio.run(send_address(server, None, "b:2"))


def test_an_unreachable_service_is_reported() -> None:
    gone = Service(name="x", role=ServiceRole.SERVER, host="127.0.0.1", port=1, environment={CLUSTER_TOKEN: "t"})
    assert not asyncio.run(send_address(gone, None, "b:2"))
