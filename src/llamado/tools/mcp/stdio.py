"""Standard I/O transport of MCP servers: one JSON-RPC message per line.

Unlike the `mcp` package's, this transport limits the rate and the length of lines, and ends the whole process group of
the server.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO

import anyio
import orjson
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from llamado.processes.guarded import PipedProcess, Watchdog
from llamado.processes.secret_values import child_environment
from llamado.tools.mcp.bounds import MessageSize, MessageTooLarge, Pace, Received
from llamado.tools.mcp.config import McpServerConfig

log = logging.getLogger("llamado.tools")

_PIECE = 64 * 1024
_STDERR_KEPT = 2000  # characters
_GRACE = 2.0  # seconds to exit after its input is closed, and again after SIGTERM
_CHANGED = "notifications/tools/list_changed"

_Sent = ObjectSendStream[SessionMessage]


async def _lines(pipe: IO[bytes]) -> AsyncIterator[bytes]:
    """Yield the lines of a pipe. Raises MessageTooLarge."""
    reader = asyncio.StreamReader(_PIECE)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    pace, kept, size = Pace(), list[bytes](), MessageSize()
    try:
        while piece := await reader.read(_PIECE):
            parts = piece.split(b"\n")
            await pace.spend(len(piece), len(parts) - 1)
            for part in parts[:-1]:
                size.add(part)
                yield b"".join([*kept, part])
                size.end()
                kept = []
            kept.append(parts[-1])
            size.add(parts[-1])
    finally:
        transport.close()


class StdioServer:
    """A server's process. `over` is set after it has exited or violated a limit."""

    def __init__(self, config: McpServerConfig, guard: Watchdog) -> None:
        """Start it. Raises OSError and ValueError."""
        self._name = config.name
        self.over = asyncio.Event()
        self._ended = asyncio.Event()
        self.last_words = ""
        loop = asyncio.get_running_loop()

        def end() -> None:
            self._ended.set()
            self.over.set()

        def on_exit(_: int) -> None:
            loop.call_soon_threadsafe(end)

        self._process = PipedProcess(
            config.command,
            child_environment() | dict(config.env),
            guard,
            on_exit=on_exit,
            cwd=config.cwd or None,
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[tuple[Received, _Sent]]:
        """Yield the streams for a session of the `mcp` package; the process ends with the session."""
        to_session, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_session = anyio.create_memory_object_stream[SessionMessage](0)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, to_session)
            tasks.start_soon(self._write, from_session)
            tasks.start_soon(self._read_errors)
            try:
                yield from_server, to_server
            finally:
                with anyio.CancelScope(shield=True):
                    await self._end()
                tasks.cancel_scope.cancel()

    async def _read(self, to_session: ObjectSendStream[SessionMessage | Exception]) -> None:
        try:
            async with to_session:
                async for line in _lines(self._process.stdout):
                    message = _parse(line)
                    if message is not None:
                        await to_session.send(message)
        except MessageTooLarge as error:
            log.warning("MCP server %s: ended: %s", self._name, error)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, OSError):
            pass
        self.over.set()

    async def _write(self, from_session: ObjectReceiveStream[SessionMessage]) -> None:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, self._process.stdin)
        writer = asyncio.StreamWriter(transport, protocol, None, loop)
        try:
            async with from_session:
                async for message in from_session:
                    writer.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await writer.drain()
        except OSError:
            self.over.set()
        finally:
            transport.close()

    async def _read_errors(self) -> None:
        try:
            async for line in _lines(self._process.stderr):
                text = line[:_STDERR_KEPT].decode("utf-8", "replace").rstrip()
                if text:
                    self.last_words = text
                    log.debug("MCP server %s: %s", self._name, text)
        except (MessageTooLarge, OSError):
            self.over.set()

    async def _end(self) -> None:
        """Close its input, as the specification requires; then stop its process group."""
        try:
            self._process.stdin.close()
        except OSError:
            pass
        for sig in (signal.SIGTERM, signal.SIGKILL):
            try:
                async with asyncio.timeout(_GRACE):
                    await self._ended.wait()
                return
            except TimeoutError:
                self._process.signal(sig)
        try:
            async with asyncio.timeout(_GRACE):
                await self._ended.wait()
        except TimeoutError:
            log.warning("MCP server %s: process %d does not exit", self._name, self.pid)


def _parse(line: bytes) -> SessionMessage | None:
    """Parse a line: a response, a request, or a change of the tools; None for anything else."""
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(fields, dict) or ("id" not in fields and fields.get("method") != _CHANGED):
        return None
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_python(fields, by_name=False))
    except ValueError:
        return None
