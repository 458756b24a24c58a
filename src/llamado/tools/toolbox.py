"""All tools of a server, and their threads."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from llamado.tools.builtin.edit import EditFile
from llamado.tools.builtin.files import ReadFile, WriteFile
from llamado.tools.builtin.search import FileGlobSearch, GrepSearch
from llamado.tools.builtin.shell import ExecShellCommand, GetInfo
from llamado.tools.builtin.tool import BuiltinTool, Result, ToolEnvironment
from llamado.tools.commands import CommandRunner
from llamado.tools.errors import InvalidCall, ToolFailed, ToolsError
from llamado.tools.folder import Folder
from llamado.tools.host import LocalToolHost, ToolHost
from llamado.tools.mcp.servers import McpServers
from llamado.tools.runtime import Container, RemoteToolHost, command_wrapper
from llamado.tools.settings import ToolSettings
from llamado.tools.tool import Call, Tool

log = logging.getLogger("llamado.tools")

_LONGEST_REASON = 300  # characters in a log line

BUILTIN: tuple[type[BuiltinTool], ...] = (
    ReadFile, FileGlobSearch, GrepSearch, ExecShellCommand, WriteFile, EditFile, GetInfo
)  # fmt: skip
NAMES = tuple(tool.name for tool in BUILTIN)
AT_ONCE = 8
"""Concurrent calls of one built-in tool; more wait. Slow commands do not delay other tools."""


class Toolbox:
    """The tools of one server."""

    def __init__(self, settings: ToolSettings) -> None:
        """Raises ToolsError."""
        wanted = set(settings.builtin)
        for name in settings.builtin:
            if name != "all" and name not in NAMES:
                raise ToolsError(f'unknown tool "{name}". available tools: {", ".join(NAMES)}')
        self._commands = CommandRunner()
        self._folder = Folder(settings.folder) if wanted else None
        self._runtime = settings.runtime if wanted else ""
        self._container = None
        if self._runtime.startswith(("docker:", "podman:")):
            self._container = Container(self._runtime, self._commands)
        elif self._runtime:
            command_wrapper(self._runtime)  # validates it
        environment = ToolEnvironment(self._host, self._in_thread)
        self._tools: dict[str, Tool] = {
            tool.name: tool(environment) for tool in BUILTIN if tool.name in wanted or "all" in wanted
        }
        self._servers = McpServers(settings.servers, self._commands.guard) if settings.servers else None
        self._threads = {name: ThreadPoolExecutor(AT_ONCE, thread_name_prefix="llamado-tool") for name in self._tools}
        self._stopping = threading.Event()

    def close(self) -> None:
        """Stop all tools at once."""
        self._stopping.set()
        if self._servers is not None:
            self._servers.close()
        if self._container is not None:
            self._container.close()
        self._commands.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        if self._folder is not None:
            self._folder.close()

    def _host(self, call: Call) -> ToolHost:
        assert self._folder is not None
        if call.runtime and ExecShellCommand.name not in self._tools:
            # Clients that may run commands can access everything anyway; others must not choose a host.
            raise InvalidCall("X-Tool-Runtime needs exec_shell_command among --tools")
        spec = call.runtime or (self._container.spec() if self._container else self._runtime)
        if spec:
            return RemoteToolHost(command_wrapper(spec), self._commands, call.cwd)
        return LocalToolHost(self._folder, self._commands, call.cwd)

    async def tools(self) -> list[Tool]:
        """Return all tools. MCP tools whose name is taken are left out."""
        found = dict(self._tools)
        for tool in await self._servers.tools() if self._servers is not None else ():
            if found.setdefault(tool.name, tool) is not tool:
                log.warning("MCP tool %s: left out, another tool has this name", tool.name)
        return [*found.values()]

    async def find(self, name: str) -> Tool | None:
        """Return the tool with this name; None if there is none."""
        if name in self._tools or self._servers is None:
            return self._tools.get(name)
        known = {tool.name: tool for tool in reversed(self._servers.known_tools())}
        if name not in known:  # it may be a tool of a starting server
            known = {tool.name: tool for tool in reversed(await self._servers.tools())}
        return known.get(name)

    async def use(self, tool: Tool, call: Call) -> dict[str, Any]:
        """Run a tool; return its result, or the reason of its failure. Raises InvalidCall."""
        began = time.perf_counter()
        try:
            found = await tool.use(call)
        except ToolFailed as error:
            found = {"error": str(error)}
        except OSError as error:
            found = {"error": error.strerror or str(error)}
        seconds = time.perf_counter() - began
        if "error" in found:
            why = " ".join(str(found["error"]).split())[:_LONGEST_REASON]
            log.info("tool %s failed after %.1f ms: %s", tool.name, seconds * 1e3, why)
        else:
            log.info("tool %s after %.1f ms", tool.name, seconds * 1e3)
        return found

    async def _in_thread(self, name: str, work: Callable[[Call], Result], call: Call) -> Result:
        gone = threading.Event()
        watched = replace(call, is_stopped=lambda: gone.is_set() or self._stopping.is_set())
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads[name], work, watched)
        finally:
            gone.set()  # the client may have disconnected
