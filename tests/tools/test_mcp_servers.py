"""MCP servers: listed, called, restarted; and misbehaving ones do no harm."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from test_tool_commands import gone, is_running
from waiting import GUARD, until, until_async

from llamado.tools.errors import ToolsError
from llamado.tools.mcp import servers as mcp_servers
from llamado.tools.mcp.config import McpServerConfig, read_servers
from llamado.tools.settings import ToolSettings
from llamado.tools.tool import Call
from llamado.tools.toolbox import Toolbox

# Importing the `mcp` package is slow: only the tests that need it import it.
if TYPE_CHECKING:
    from mcp.shared.message import SessionMessage

    from llamado.tools.mcp.server import McpServer

STAND_IN = str(Path(__file__).with_name("mcp_stand_in.py"))


def stand_in(mode: str = "", **more: Any) -> dict[str, Any]:
    return {"command": sys.executable, "args": ["-I", "-S", STAND_IN, *([mode] if mode else [])], **more}


Use = Callable[..., Any]


@asynccontextmanager
async def toolbox(builtin: tuple[str, ...] = (), **servers: dict[str, Any]) -> AsyncIterator[tuple[Toolbox, Use]]:
    configs = tuple(read_servers(json.dumps({"mcpServers": servers}), "test"))
    box = Toolbox(ToolSettings(servers=configs, builtin=builtin))

    async def use(name: str, text: str = "") -> Any:
        tool = await box.find(name)
        assert tool is not None, name
        return await box.use(tool, Call(params={"text": text}))

    try:
        yield box, use
    finally:
        await asyncio.to_thread(box.close)


def server_of(box: Toolbox) -> McpServer:
    assert box._servers is not None
    return box._servers._servers[0]


def pid_of(box: Toolbox) -> int:
    return server_of(box).pid


def run(test: Callable[[], Any]) -> None:
    asyncio.run(test())


@pytest.mark.slow
def test_tools_are_listed_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamado.tools.mcp import stdio

    monkeypatch.setattr(stdio, "_GRACE", 0.05)

    async def test() -> None:
        async with toolbox(("read_file",), a=stand_in(), b=stand_in()) as (box, use):
            tools = [tool.entry() for tool in await box.tools()]
            assert [tool["type"] for tool in tools] == ["server"] + ["mcp"] * 24
            assert tools[1] == {
                "tool": "a_echo",
                "display_name": "a_echo",
                "type": "mcp",
                "permissions": {"write": False},
                "uses_cwd": False,
                "definition": {
                    "type": "function",
                    "function": {
                        "name": "a_echo",
                        "description": "does echo",
                        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
                    },
                },
            }
            assert await use("a_echo", "hi") == {"plain_text_response": "hi\necho"}
            assert await use("b_fail", "no") == {"error": "no\nfail"}
            assert await use("a_bad_result") == {"error": "invalid response from MCP server"}
            assert await box.find("a_none") is None
            # A slow call delays no other call, not even of the same server.
            slow = asyncio.ensure_future(use("a_wait", "60"))
            assert await use("b_echo", "quick") == {"plain_text_response": "quick\necho"}
            assert not slow.done()
            slow.cancel()

    run(test)


@pytest.mark.slow
def test_a_crashed_server_is_restarted(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamado.tools.mcp import server

    monkeypatch.setattr(server, "FIRST_WAIT", 50.0)

    async def test() -> None:
        async with toolbox(a=stand_in()) as (box, use):
            await box.tools()
            first = pid_of(box)
            assert await use("a_crash") == {"error": "Connection closed"}
            assert await use("a_echo", "x") == {"plain_text_response": "x\necho"}
            assert pid_of(box) != first
            # A server that keeps crashing is not restarted for a while.
            assert (await use("a_crash"))["error"] == "Connection closed"
            assert (await use("a_crash"))["error"] == "Connection closed"
            assert (await use("a_echo"))["error"].startswith("MCP server unavailable: a")
            waits = server_of(box)._not_before - time.monotonic()
            assert 0 < waits <= 60
            server_of(box)._not_before -= waits
            assert await use("a_echo", "y") == {"plain_text_response": "y\necho"}

    run(test)


@pytest.mark.full
@pytest.mark.parametrize("tool", ["flood", "long_line", "wait"])
def test_a_server_that_floods_or_hangs(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    """The call ends in time, other calls are not delayed, and the next call gets a new server."""
    from llamado.tools.mcp import server, stdio

    monkeypatch.setattr(server, "_PING_SECONDS", 1.0)
    monkeypatch.setattr(stdio, "_GRACE", 0.5)

    async def test() -> None:
        async with toolbox(a=stand_in(timeout_ms=1500), b=stand_in()) as (box, use):
            await box.tools()
            first = pid_of(box)
            slow = asyncio.ensure_future(use(f"a_{tool}", "60"))
            while not slow.done():
                assert await use("b_echo", "x") == {"plain_text_response": "x\necho"}
                await asyncio.sleep(0.02)
            assert (await slow)["error"] in ("request timed out", "Connection closed", "transport closed")
            await asyncio.to_thread(gone, first)  # it did not answer the ping
            await until_async(lambda: server_of(box)._not_before < time.monotonic())
            assert await use("a_echo", "x") == {"plain_text_response": "x\necho"}

    run(test)


@pytest.mark.parametrize(("line", "number"), [("x", 50_000), ("x" * 100_000, 500)])
def test_the_read_rate_is_bounded(monkeypatch: pytest.MonkeyPatch, line: str, number: int) -> None:
    from llamado.tools.mcp import bounds, stdio

    slept = 0.0
    real_sleep = asyncio.sleep

    async def sleep(seconds: float) -> None:
        nonlocal slept
        slept += seconds
        await real_sleep(0)

    monkeypatch.setattr(bounds, "time", SimpleNamespace(monotonic=lambda: slept))
    monkeypatch.setattr(bounds, "asyncio", SimpleNamespace(sleep=sleep))

    async def test() -> None:
        with subprocess.Popen(["sh", "-c", f"yes {line} | head -n {number}"], stdout=subprocess.PIPE) as flood:
            assert flood.stdout is not None
            assert [message async for message in stdio._lines(flood.stdout)] == [line.encode()] * number

    run(test)
    cost = number * (len(line) + 1 + 1024)
    assert slept == pytest.approx(cost / bounds.RATE - 1)


def test_the_length_of_lines_is_bounded() -> None:
    from llamado.tools.mcp import bounds, stdio

    async def test() -> None:
        flood = subprocess.Popen(["sh", "-c", "echo one; yes x | tr -d '\\n'"], stdout=subprocess.PIPE)
        assert flood.stdout is not None
        lines = stdio._lines(flood.stdout)
        assert await anext(lines) == b"one"
        with pytest.raises(bounds.MessageTooLarge):
            await asyncio.wait_for(anext(lines), GUARD)
        flood.kill()
        flood.wait()

    run(test)


@pytest.mark.slow
def test_output_other_than_responses_is_ignored() -> None:
    async def test() -> None:
        async with toolbox(a=stand_in()) as (_, use):
            for name in ("stderr", "garbage", "many", "echo"):
                assert await use(f"a_{name}", "x") == {"plain_text_response": f"x\n{name}"}

    run(test)


@pytest.mark.slow
def test_grandchildren_end_with_the_server() -> None:
    async def test() -> None:
        async with toolbox(a=stand_in()) as (box, use):
            orphan = int((await use("a_orphan"))["plain_text_response"].split("\n")[0])
            assert is_running(orphan)
            server = pid_of(box)
        assert gone(server) and gone(orphan)

    run(test)


@pytest.mark.slow
def test_servers_that_do_not_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from llamado.tools.mcp import server, stdio

    monkeypatch.setattr(mcp_servers, "LIST_SECONDS", 1.0)
    monkeypatch.setattr(server, "START_SECONDS", 10 * GUARD)
    monkeypatch.setattr(stdio, "_GRACE", 0.05)

    async def test() -> None:
        servers = {"none": {"command": "/no/such/command"}, "fails": stand_in("fail"), "hangs": stand_in("hang")}
        async with toolbox(a=stand_in(), **servers) as (box, use):
            assert {tool.name.split("_")[0] for tool in await box.tools()} == {"a"}
            # Failed servers are not waited for again.
            assert len(await asyncio.wait_for(box.tools(), GUARD)) == 12
            assert "MCP server none: session ended: /no/such/command: No such file or directory" in caplog.messages
            assert await use("a_echo", "x") == {"plain_text_response": "x\necho"}

    run(test)


@pytest.mark.slow
def test_over_http() -> None:
    from mcp.server.mcpserver import MCPServer

    app = MCPServer("web")

    @app.tool()
    def double(text: str) -> str:
        return text * 2

    config = uvicorn.Config(app.streamable_http_app(), port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]

    async def test() -> None:
        web, gone_web = {"url": f"http://127.0.0.1:{port}/mcp"}, {"url": "http://127.0.0.1:1/mcp"}
        async with toolbox(web=web, gone=gone_web) as (box, use):
            assert [tool.name for tool in await box.tools()] == ["web_double"]
            assert await use("web_double", "ab") == {"plain_text_response": "abab"}
            # The server forgets all sessions, like a restarted one.
            app.session_manager._server_instances.clear()
            assert await use("web_double", "cd") == {"plain_text_response": "cdcd"}
            server.should_exit = server.force_exit = True
            await asyncio.to_thread(thread.join, GUARD)
            assert "error" in await use("web_double", "ab")

    run(test)


def message(result: Any) -> SessionMessage:
    from mcp import types
    from mcp.shared.message import SessionMessage

    return SessionMessage(types.JSONRPCResponse(jsonrpc="2.0", id=7, result=result))


def test_the_parts_of_a_message_are_bounded() -> None:
    """The `mcp` package takes 4 s to validate 200,000 parts, in which no other thread runs."""
    import anyio
    from mcp import types
    from mcp.shared.message import SessionMessage

    from llamado.tools.mcp import bounds

    part = {"type": "text", "text": "x"}
    few, many = message({"content": [part] * 1000}), message({"content": [part] * (bounds.MOST_OBJECTS + 1)})
    unchecked = message({"content": [], "structuredContent": {"rows": [part] * 5000}})

    async def test() -> None:
        to_filter, received = anyio.create_memory_object_stream[SessionMessage | Exception](9)
        to_session, passed = anyio.create_memory_object_stream[SessionMessage | Exception](9)
        for one in (few, many, unchecked):
            to_filter.send_nowait(one)
        to_filter.close()
        await bounds.pass_bounded(received, to_session)
        assert passed.receive_nowait() is few
        refused = passed.receive_nowait()
        assert isinstance(refused, SessionMessage) and isinstance(refused.message, types.JSONRPCError)
        assert refused.message.id == 7 and "more than 2000 objects" in refused.message.error.message
        assert passed.receive_nowait() is unchecked

    run(test)
    size = bounds.MessageSize()
    for _ in range(3):
        size.add(b"[{}" * (bounds.MOST_CONTAINERS // 2))
        size.end()
    with pytest.raises(bounds.MessageTooLarge, match="more than 20000 objects"):
        size.add(b"{" * (bounds.MOST_CONTAINERS + 1))


@pytest.mark.slow
def test_a_result_of_too_many_parts_fails_alone() -> None:
    async def test() -> None:
        async with toolbox(a=stand_in()) as (_, use):
            assert "more than 2000 objects" in (await use("a_parts", "3000"))["error"]
            assert await use("a_echo", "x") == {"plain_text_response": "x\necho"}

    run(test)


EVENT = b"data: " + b"x" * 60_000 + b"\n\n"


@pytest.mark.parametrize(
    ("headers", "body", "error"),
    [
        ({"content-encoding": "gzip"}, [zlib.compress(bytes(9 << 20), wbits=31)], "RemoteProtocolError"),
        ({}, [bytes(1 << 20)] * 9, "ReadError"),
        ({"content-type": "text/event-stream"}, [b"data: x\n" * 100_000] * 12, "ReadError"),
        ({"content-type": "text/event-stream"}, [EVENT] * 150, None),
        ({"content-type": "application/json"}, [b"[{}," * 10_001], "ReadError"),
    ],
    ids=["bomb", "long", "endless event", "events", "objects"],
)
def test_responses_over_http_are_bounded(
    monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], body: list[bytes], error: str | None
) -> None:
    import httpx2

    from llamado.tools.mcp import bounds
    from llamado.tools.mcp.http import BoundedHttp

    class Body(httpx2.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            for piece in body:
                yield piece

    async def answer(_: Any, request: httpx2.Request) -> httpx2.Response:
        assert request.headers["accept-encoding"] == "identity"
        return httpx2.Response(200, headers=headers, stream=Body())

    monkeypatch.setattr(httpx2.AsyncHTTPTransport, "handle_async_request", answer)
    monkeypatch.setattr(bounds, "RATE", 1 << 40)

    async def test() -> None:
        async with httpx2.AsyncClient(transport=BoundedHttp()) as client:
            if error is None:
                assert (await client.get("http://x/")).content == b"".join(body)
            else:
                with pytest.raises(getattr(httpx2, error)):
                    await client.get("http://x/")

    run(test)


def test_configurations(caplog: pytest.LogCaptureFixture) -> None:
    text = """{"mcpServers": {
        "files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "b"}, "cwd": "/tmp", "timeout_ms": 500},
        "web": {"url": "https://example.com/mcp", "headers": {"Authorization": "Bearer x"}},
        "nothing": {"args": []}, "off": {"command": "x", "disabled": true}
    }, "other": 1}"""
    files = McpServerConfig(name="files", command=("npx", "-y", "x"), env={"A": "b"}, cwd="/tmp", timeout=0.5)
    web = McpServerConfig(name="web", url="https://example.com/mcp", headers={"Authorization": "Bearer x"})
    assert read_servers(text, "f") == [files, web]
    (message,) = [record.message for record in caplog.records]
    assert message == "f: server nothing: ignored, it has neither a command nor a url"
    assert read_servers("{}", "f") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "f: invalid JSON"),
        ("[]", "f: expected"),
        ('{"mcpServers": []}', "f: expected"),
        ('{"mcpServers": {"a": 3}}', "f: server a: expected an object"),
        ('{"mcpServers": {"a": {"command": 3}}}', "f: server a: command: expected a string, got 3"),
        ('{"mcpServers": {"a": {"command": "x", "args": [1]}}}', "f: server a: args: expected an array of strings"),
        ('{"mcpServers": {"a": {"command": "x", "env": {"b": 1}}}}', "f: server a: env: expected an object of strings"),
        ('{"mcpServers": {"a": {"command": "x", "timeout_ms": 0}}}', "f: server a: timeout_ms: expected milliseconds"),
        ('{"mcpServers": {"a": {"url": "ftp://x"}}}', "f: server a: url: expected http:// or https://"),
    ],
)
def test_invalid_configurations(text: str, why: str) -> None:
    with pytest.raises(ToolsError) as raised:
        read_servers(text, "f")
    assert str(raised.value).startswith(why)


def test_a_missing_mcp_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "find_spec", lambda name: None)
    with pytest.raises(ToolsError, match="install"):
        Toolbox(ToolSettings(servers=(McpServerConfig(name="a", command=("x",)),)))
