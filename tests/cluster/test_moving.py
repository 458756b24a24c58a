"""Who is told that a service has another address: what is asked of gateways and of servers, and what counts as told."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from llamado.cluster.moving import tell_address
from llamado.cluster.services import ADMIN_KEY, CLUSTER_TOKEN, Service, ServiceRole


class Told(ThreadingHTTPServer):
    """Notes what it is asked, and answers 200 or what `statuses` has for a path."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()
        self.statuses: dict[str, int] = {}
        super().__init__(("127.0.0.1", 0), _Handler)

    def service(self, role: ServiceRole) -> Service:
        environment = {ADMIN_KEY: "admin", CLUSTER_TOKEN: "token"}
        return Service(name="x", role=role, host="127.0.0.1", port=self.server_port, environment=environment)


class _Handler(BaseHTTPRequestHandler):
    server: Told

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        path = self.path.partition("?")[0]
        self.server.asked.append((self.command, self.path, json.loads(self.rfile.read(length)) if length else None))
        self.server.keys.add(self.headers.get("Authorization") or self.headers.get("X-Cluster-Token"))
        self.send_response(self.server.statuses.get(f"{self.command} {path}", 200))
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_POST

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def told() -> Iterator[Told]:
    with Told() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(60)


def test_a_gateway_gets_the_new_replica_and_lets_the_old_one_go(told: Told) -> None:
    gateway = told.service(ServiceRole.GATEWAY)
    assert asyncio.run(tell_address(gateway, "http://a:1/x", "http://b:2/x"))
    assert told.asked == [
        ("DELETE", "/gateway/replicas?replica=http%3A%2F%2Fa%3A1%2Fx", None),
        ("POST", "/gateway/replicas", {"url": "http://b:2/x"}),
    ]
    assert told.keys == {"Bearer admin"}
    told.asked.clear()
    assert asyncio.run(tell_address(gateway, None, "http://b:2"))
    assert [method for method, *_ in told.asked] == ["POST"]
    told.statuses["DELETE /gateway/replicas"] = 404
    assert asyncio.run(tell_address(gateway, "http://a:1", "http://b:2")), "it does not know the old one any more"
    told.statuses["POST /gateway/replicas"] = 500
    assert not asyncio.run(tell_address(gateway, None, "http://b:2"))


def test_a_server_lets_the_old_worker_go_before_the_new_one_joins(told: Told) -> None:
    server = told.service(ServiceRole.SERVER)
    told.statuses["POST /cluster/drain"] = 404
    assert asyncio.run(tell_address(server, "a:1", "b:2"))
    assert told.asked == [
        ("POST", "/cluster/drain", {"endpoint": "a:1"}),
        ("POST", "/cluster/join", {"endpoint": "b:2"}),
    ]
    assert told.keys == {"token"}
    told.asked.clear()
    told.statuses["POST /cluster/drain"] = 503  # the others have no room for its layers
    assert not asyncio.run(tell_address(server, "a:1", "b:2"))
    assert len(told.asked) == 1
    told.statuses["POST /cluster/join"] = 503
    assert not asyncio.run(tell_address(server, None, "b:2"))


def test_one_that_is_away_is_not_told() -> None:
    gone = Service(name="x", role=ServiceRole.SERVER, host="127.0.0.1", port=1, environment={CLUSTER_TOKEN: "t"})
    assert not asyncio.run(tell_address(gone, None, "b:2"))
