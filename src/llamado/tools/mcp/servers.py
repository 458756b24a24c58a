"""All MCP servers, in a thread with its own event loop, so that they cannot block the server's."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from llamado.installation import install_command
from llamado.processes.guarded import Watchdog
from llamado.tools.errors import ToolFailed, ToolsError
from llamado.tools.mcp.config import McpServerConfig
from llamado.tools.tool import Call, Tool

if TYPE_CHECKING:
    from llamado.tools.mcp.server import McpServer, McpToolInfo

log = logging.getLogger("llamado.tools")

LIST_SECONDS = 10.0
"""Time that listing tools waits for a starting server (tools/server/server-mcp.cpp, b11434)."""
_CLOSE_SECONDS = 8.0
T = TypeVar("T")


class McpTool(Tool):
    """A tool of an MCP server. Its name is the server's name and its own."""

    type = "mcp"
    uses_cwd = False

    def __init__(self, info: McpToolInfo, servers: McpServers) -> None:
        self._info = info
        self._servers = servers
        self.name = self.title = f"{info.server}_{info.name}"
        self.description, self.parameters = info.description, info.schema

    async def use(self, call: Call) -> dict[str, Any]:
        return await self._servers.call(self._info, call.params)


class McpServers:
    """Starts all servers in the background."""

    def __init__(self, configs: Sequence[McpServerConfig], guard: Watchdog) -> None:
        """Raises ToolsError if the `mcp` package is missing."""
        if find_spec("mcp") is None:
            raise ToolsError(f"MCP servers need the mcp package: {install_command('mcp')}")
        self._configs = configs
        self._guard = guard
        self._servers: list[McpServer] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="llamado-mcp", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._list(), self._loop)

    def _work(self) -> None:
        # Importing takes half a second; here it blocks no request.
        from llamado.tools.mcp.server import McpServer

        asyncio.set_event_loop(self._loop)
        self._servers = [McpServer(config, self._guard) for config in self._configs]
        self._loop.run_forever()

    def close(self) -> None:
        """Stop all servers."""

        async def end() -> None:
            await asyncio.gather(*(server.close() for server in self._servers))

        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(_CLOSE_SECONDS)
        except TimeoutError:
            log.warning("some MCP servers did not end in time")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)

    async def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the servers' loop; cancel it if its waiter is cancelled."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def known_tools(self) -> list[McpTool]:
        """Return the tools of all servers that have listed theirs."""
        return [McpTool(info, self) for server in self._servers for info in server.tools or ()]

    async def tools(self) -> list[McpTool]:
        """Return all tools, after waiting LIST_SECONDS at most for starting servers."""
        await self._in_loop(self._list())
        return self.known_tools()

    async def _list(self) -> None:
        pending = [
            asyncio.ensure_future(self._wait_for_tools(server)) for server in self._servers if server.tools is None
        ]
        if pending:
            await asyncio.wait(pending)

    async def _wait_for_tools(self, server: McpServer) -> None:
        task = asyncio.ensure_future(server.list_tools())
        await asyncio.sleep(0)  # lets the task start the server, which sets `began`
        await asyncio.wait([task], timeout=max(0.1, server.began + LIST_SECONDS - time.monotonic()))
        if not task.done():
            task.cancel()
        elif isinstance(error := task.exception(), ToolFailed):
            log.debug("%s", error)
        elif error is not None:
            log.error("MCP server %s", server.config.name, exc_info=error)

    async def call(self, info: McpToolInfo, arguments: Any) -> dict[str, Any]:
        """Call a tool and return its result. Raises ToolFailed."""
        (server,) = [server for server in self._servers if server.config.name == info.server]
        return await self._in_loop(server.call(info.name, arguments))
