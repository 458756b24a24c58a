"""One MCP server: started on demand, restarted after it ended, with a growing pause after failures."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2
from mcp import types
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage

from llamado import __version__
from llamado.processes.guarded import Watchdog
from llamado.tools.errors import ToolFailed
from llamado.tools.mcp.bounds import LONGEST_MESSAGE, pass_bounded
from llamado.tools.mcp.config import McpServerConfig
from llamado.tools.mcp.http import BoundedHttp
from llamado.tools.mcp.stdio import StdioServer

log = logging.getLogger("llamado.tools")

START_SECONDS = 60.0
"""Time to initialize and to list the tools. The first start may download the server (npx, uvx)."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds until a failed server is started again; doubles with each further failure."""
_PING_SECONDS = 5.0
_MOST_PAGES = 50  # of a list of tools
_MOST_TEXT = 4 << 20  # characters of one result


@dataclass(frozen=True)
class McpToolInfo:
    """A server's description of a tool."""

    server: str
    name: str
    description: str
    schema: Mapping[str, Any]


class McpServer:
    """One server. Call all methods in the event loop of `McpServers`."""

    def __init__(self, config: McpServerConfig, guard: Watchdog) -> None:
        self.config = config
        self._guard = guard
        self.tools: list[McpToolInfo] | None = None
        """The last list; None: not listed yet, or outdated."""
        self.began = 0.0
        """Time of the last start (time.monotonic())."""
        self.pid = 0
        """Process id; 0: no process."""
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[ClientSession] | None = None
        self._over = asyncio.Event()
        self._failures = 0
        self._not_before = 0.0
        self._calls = 0
        self._last_words = ""

    async def session(self) -> ClientSession:
        """Return a session, starting the server if necessary. Raises ToolFailed."""
        if self._task is None or self._over.is_set():
            if self._task is not None:
                await asyncio.wait([self._task])  # until its process has exited
            if self._task is None or self._task.done():
                self._start()
        assert self._ready is not None
        return await asyncio.shield(self._ready)

    def _start(self) -> None:
        name = self.config.name
        if time.monotonic() < self._not_before:
            raise ToolFailed(f"MCP server unavailable: {name}" + (f": {self._last_words}" if self._last_words else ""))
        self._over = asyncio.Event()
        self.began = time.monotonic()
        self._ready = asyncio.get_running_loop().create_future()
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())  # marks it as retrieved
        self._task = asyncio.ensure_future(self._run(self._ready))

    async def close(self) -> None:
        """Stop the server."""
        self._not_before = float("inf")
        self._over.set()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self, ready: asyncio.Future[ClientSession]) -> None:
        """Run one session from start to end."""
        name, why = self.config.name, "it ended"
        try:
            async with self._streams() as (received, write), anyio.create_task_group() as tasks:
                to_session, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
                tasks.start_soon(pass_bounded, received, to_session)
                info = types.Implementation(name="llamado", version=__version__)
                async with ClientSession(read, write, client_info=info, message_handler=self._on_message) as session:
                    await self._greet(session)
                    ready.set_result(session)
                    log.info("MCP server %s: %d tools", name, len(self.tools or ()))
                    await self._over.wait()
                tasks.cancel_scope.cancel()
        except Exception as error:
            why = _reason(error)
        finally:
            self.pid = 0
            self._over.set()
            # A successful call resets this count.
            self._failures += 1
            wait = min(LONGEST_WAIT, FIRST_WAIT * 2 ** (self._failures - 2)) if self._failures > 1 else 0.0
            if not ready.done():
                wait = max(wait, FIRST_WAIT)
                if self._last_words:
                    why += f" ({self._last_words})"
                ready.set_exception(ToolFailed(f"MCP server unavailable: {name}: {why}"))
            self._not_before = max(self._not_before, time.monotonic() + wait)
            if self._not_before != float("inf"):
                log.warning("MCP server %s: session ended: %s", name, why)

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[tuple[Any, Any]]:
        config = self.config
        if config.url:
            timeout = httpx2.Timeout(START_SECONDS, read=config.timeout + _PING_SECONDS)
            async with (
                httpx2.AsyncClient(headers=dict(config.headers), timeout=timeout, transport=BoundedHttp()) as client,
                streamable_http_client(config.url, http_client=client, max_sse_event_size=LONGEST_MESSAGE) as streams,
            ):
                yield streams
            return
        server = StdioServer(config, self._guard)
        self.pid = server.pid
        server.over = self._over
        try:
            async with server.streams() as streams:
                yield streams
        finally:
            self._last_words = server.last_words

    async def _greet(self, session: ClientSession) -> None:
        """Initialize the session. Raises TimeoutError, MCPError and others."""
        ended = asyncio.ensure_future(self._over.wait())
        greeting = asyncio.ensure_future(self._list(session))
        try:
            await asyncio.wait([greeting, ended], timeout=START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if greeting.done():
                greeting.result()
            elif ended.done():
                raise ConnectionError("it ended before it was ready")
            else:
                raise TimeoutError
        finally:
            greeting.cancel()
            ended.cancel()
            await asyncio.wait([greeting, ended])

    async def _list(self, session: ClientSession) -> None:
        await session.initialize()
        await self._relist(session)

    async def _relist(self, session: ClientSession) -> None:
        found: list[McpToolInfo] = []
        cursor = None
        for _ in range(_MOST_PAGES):
            page = await session.list_tools(params=types.PaginatedRequestParams(cursor=cursor))
            found += [
                McpToolInfo(self.config.name, tool.name, tool.description or "", tool.input_schema)
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if not cursor:
                break
        self.tools = found

    async def _on_message(self, message: object) -> None:
        """Forget the list of tools when the server announces a change."""
        if isinstance(message, types.ToolListChangedNotification):
            self.tools = None

    async def list_tools(self) -> list[McpToolInfo]:
        """Return its tools. Raises ToolFailed."""
        session = await self.session()
        if self.tools is None:
            try:
                with anyio.fail_after(self.config.timeout):
                    await self._relist(session)
            except (TimeoutError, MCPError, ValueError) as error:
                raise ToolFailed(_reason(error)) from None
        return self.tools or []

    async def call(self, tool: str, arguments: Mapping[str, Any], *, again: bool = True) -> dict[str, Any]:
        """Call a tool; return the result as `POST /tools` does. Raises ToolFailed."""
        session = await self.session()
        params = types.CallToolRequestParams(name=tool, arguments=dict(arguments))
        self._calls += 1
        try:
            with anyio.fail_after(self.config.timeout):
                # Not `call_tool`, which rejects results that do not match the tool's schema.
                request = types.CallToolRequest(params=params)
                result = await session.send_request(request, types.CallToolResult)
        except TimeoutError:
            asyncio.get_running_loop().create_task(self._stop_if_hanging(session))
            raise ToolFailed("request timed out") from None
        except MCPError as error:
            if self.config.url and error.code == types.INVALID_REQUEST:
                self._over.set()
                if again:  # the server has lost the session and did nothing
                    return await self.call(tool, arguments, again=False)
            raise ToolFailed(error.error.message) from None
        except ValueError:
            raise ToolFailed("invalid response from MCP server") from None
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._over.set()
            raise ToolFailed("transport closed") from None
        finally:
            self._calls -= 1
        self._failures = 0
        return _tool_result(result)

    async def _stop_if_hanging(self, session: ClientSession) -> None:
        """Stop a server after a timeout, if it has no other calls and does not answer a ping."""
        if self._calls:
            return
        try:
            with anyio.fail_after(_PING_SECONDS):
                await session.send_ping()
        except MCPError:
            pass  # an error is an answer, too
        except (TimeoutError, anyio.ClosedResourceError, anyio.BrokenResourceError):
            if not self._calls:
                log.warning("MCP server %s: hangs, stopping it", self.config.name)
                self._over.set()


def _tool_result(result: types.CallToolResult) -> dict[str, Any]:
    text = "\n".join(part.text for part in result.content if isinstance(part, types.TextContent))
    if len(text) > _MOST_TEXT:
        text = text[:_MOST_TEXT] + "\n[output truncated]"
    if result.is_error:
        return {"error": text or "MCP tool returned an error"}
    return {"plain_text_response": text}


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{error.filename}: {reason}" if error.filename else reason
    return str(error) or type(error).__name__
