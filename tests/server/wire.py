"""A server with real connections over the fake engine, in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fakes import TEMPLATE, FakeEngine, served

from llamado.http.access import AccessRules, busy_app
from llamado.http.connections import ConnectionLimits, configure
from llamado.http.signals import GracefulServer
from llamado.http.sockets import listen
from llamado.server.app import create_app
from llamado.server.state import ServerState
from llamado.server.switches import Switches


@dataclass
class Wire:
    """A running server; `port` is on 127.0.0.1."""

    port: int
    engine: FakeEngine
    state: ServerState
    gate: ConnectionLimits
    server: GracefulServer

    @property
    def url(self) -> str:
        return f"http{'s' if self.server.config.is_ssl else ''}://127.0.0.1:{self.port}"

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=60)


@contextlib.contextmanager
def serving(
    engine: FakeEngine | None = None,
    *,
    loaded: bool = True,
    access: AccessRules | None = None,
    timeout: float = 3600.0,
    limit: int | None = None,
    port: int = 0,
    tls: dict[str, str] | None = None,
    **switches: Any,
) -> Iterator[Wire]:
    """Run a server until the block ends. `tls`: `key` and `certificate` files."""
    engine = engine or FakeEngine()
    state = ServerState(access=access or AccessRules(), switches=Switches(**switches))
    if loaded:
        state.served = served(engine, TEMPLATE)
    gate = ConnectionLimits(limit, timeout)
    apps: list[Any] = []

    def make() -> Any:
        apps.append(create_app(state))
        server.access = apps[0].access
        return apps[0]

    refuse: Any = busy_app(lambda: apps[0], state.switches.api_prefix, lambda *refused: apps[0].refused(*refused))
    server = GracefulServer(configure(make, gate, refuse, **(tls or {})))
    sockets = listen(("127.0.0.1",), port)
    port = sockets[0].getsockname()[1]
    thread = threading.Thread(target=server.run, args=(sockets,), daemon=True)
    thread.start()
    try:
        yield Wire(port, engine, state, gate, server)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)
        engine.close()
        assert not thread.is_alive()


def read_answers(sock: socket.socket, count: int) -> list[tuple[int, dict[str, str], bytes]]:
    """Return status, headers (names as sent) and body of `n` answers on a connection; fewer if it is closed."""
    reader = sock.makefile("rb")
    answers: list[tuple[int, dict[str, str], bytes]] = []
    while len(answers) < count and (line := reader.readline()):
        status = int(line.split()[1])
        headers: dict[str, str] = {}
        while (line := reader.readline()) not in (b"\r\n", b""):
            name, _, value = line.decode("latin-1").strip().partition(": ")
            headers[name] = value
        if status == 100:
            continue
        lower = {name.lower(): value for name, value in headers.items()}
        if "content-length" in lower:
            body = reader.read(int(lower["content-length"]))
        elif lower.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(reader.readline(), 16):
                body += reader.read(size + 2)[:-2]
            reader.readline()
        else:
            body = reader.read() if lower.get("connection") == "close" else b""
        answers.append((status, headers, body))
    return answers
