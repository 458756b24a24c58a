"""uvicorn's internals: the installed version has all that this package uses, and calls what it overrides.

If a test fails after an update of uvicorn, adapt http/connections.py (or http/signals.py) to the new version, and then
the range in pyproject.toml.
"""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from llamado.http import connections, signals
from llamado.http.answer import json_response
from llamado.http.connections import WRITE, ConnectionLimits, HttpConnection


class Transport(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Server:
    """An application on one connection."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []
        config = uvicorn.Config(self.app, log_config=None, lifespan="off", access_log=False, interface="asgi3")
        state: Any = ServerState()
        limits = ConnectionLimits(10)
        self.connection = HttpConnection(
            config=config, server_state=state, app_state={}, limits=limits, refuse=self.app
        )
        self.state = state
        self.transport = Transport()

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        await json_response(b"{}", headers={"x-y": "1"})(scope, receive, send)

    async def request(self, data: bytes) -> bytes:
        """Connect, send bytes, and return all that is sent back."""
        self.connection.connection_made(self.transport)
        self.connection.data_received(data)
        while self.state.tasks:
            await asyncio.wait(self.state.tasks)
        self.connection.connection_lost(None)
        return self.transport.written


def serve(data: bytes) -> tuple[Server, bytes]:
    async def main() -> tuple[Server, bytes]:
        server = Server()
        return server, await server.request(data)

    return asyncio.run(main())


def names_used(module: Any, class_name: str) -> tuple[set[str], set[str], set[str]]:
    """Return the inherited attributes that a class uses: of `self`, of `super()`, and of `cycle`."""
    tree = ast.parse(Path(module.__file__).read_text())
    (node,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == class_name]
    own = {one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
    own |= {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    used: dict[str, set[str]] = {"self": set(), "super": set(), "cycle": set()}
    for one in ast.walk(node):
        if not isinstance(one, ast.Attribute):
            continue
        if isinstance(one.value, ast.Name) and one.value.id in used:
            is_set_here = isinstance(one.ctx, ast.Store) and one.value.id == "self" and one.attr.startswith("_")
            (own if is_set_here else used[one.value.id]).add(one.attr)
        elif isinstance(one.value, ast.Call) and isinstance(one.value.func, ast.Name) and one.value.func.id == "super":
            used["super"].add(one.attr)
        elif isinstance(one.value, ast.Attribute) and one.value.attr == "cycle":
            used["cycle"].add(one.attr)
    return used["self"] - own - {"limits", "refuse"}, used["super"] - {"__init__"}, used["cycle"]


def missing(thing: Any, names: set[str]) -> str:
    lost = sorted(name for name in names if not hasattr(thing, name))
    kind = thing if isinstance(thing, type) else type(thing)
    return "" if not lost else f"uvicorn {uvicorn.__version__}: {kind.__name__} has no {', '.join(lost)}"


def test_the_connection_class_finds_its_base() -> None:
    inherited, overridden, of_cycle = names_used(connections, "HttpConnection")
    assert {"flow", "pipeline"} <= inherited and "_start_asgi_task" in overridden and "message_event" in of_cycle
    server, _ = serve(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert missing(server.connection, inherited) == ""
    assert missing(HttpToolsProtocol, overridden) == ""
    assert missing(server.connection.cycle, of_cycle) == ""


def test_the_server_class_finds_its_base() -> None:
    inherited, overridden, _ = names_used(signals, "GracefulServer")
    server = uvicorn.Server(uvicorn.Config(lambda: None, log_config=None))
    assert {"force_exit", "server_state", "handle_exit"} <= inherited and overridden == {"shutdown", "startup"}
    assert missing(server, inherited | overridden | {"capture_signals"}) == ""
    assert missing(server.config, {"timeout_graceful_shutdown"}) == ""
    assert missing(server.server_state, {"connections", "tasks"}) == ""


@pytest.mark.parametrize("pipelined", [1, 2])
def test_overridden_methods_are_called(pipelined: int) -> None:
    """The head in title case and the extensions prove that `_start_asgi_task` and `on_message_begin` are in use."""
    server, answer = serve(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * pipelined)
    assert answer.count(b"\r\nX-Y: 1\r\n") == pipelined, f"uvicorn {uvicorn.__version__}: {answer!r}"
    assert all(WRITE in scope["extensions"] for scope in server.scopes) and len(server.scopes) == pipelined


def test_http_1_0_gets_no_chunks() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await send({"type": "http.response.body", "body": b"c", "more_body": False})

    async def main() -> tuple[bytes, bool]:
        server = Server()
        server.connection.app = app
        return await server.request(b"GET / HTTP/1.0\r\n\r\n"), server.transport.closed

    answer, closed = asyncio.run(main())
    assert answer.endswith(b"\r\n\r\nabc") and b"Transfer-Encoding" not in answer and closed
