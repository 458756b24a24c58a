"""Limits on messages of MCP servers: bytes, rate, and number of parts, whose validation blocks other threads."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp import types
from mcp.shared.message import SessionMessage

LONGEST_MESSAGE = 8 << 20
"""Bytes of one message (tools/server/server-mcp.cpp, b11434)."""
MOST_CONTAINERS = 20_000
"""Objects and arrays of one message. Parsing them takes a few ms, in which no other thread runs."""
MOST_OBJECTS = 2_000
"""Objects of one message that the `mcp` package validates one by one: 4 s for 200,000 parts of a result."""
RATE = 16 << 20
"""Bytes read per second, after a burst of as many. Each line costs `_LINE_COST` more, since short lines are slower."""
_LINE_COST = 1024
_UNCHECKED = frozenset({"structuredContent", "_meta", "inputSchema", "outputSchema", "arguments"})

Received = ObjectReceiveStream[SessionMessage | Exception]


class MessageTooLarge(Exception):
    """A server sent a message that is too long or has too many parts."""


class MessageSize:
    """Checks the size of the message being received. Raises MessageTooLarge."""

    def __init__(self) -> None:
        self._n_bytes = self._n_containers = 0

    def add(self, piece: bytes) -> None:
        """Count the next bytes of the message."""
        self._n_bytes += len(piece)
        self._n_containers += piece.count(b"{") + piece.count(b"[")
        if self._n_bytes > LONGEST_MESSAGE:
            raise MessageTooLarge(f"a message of more than {LONGEST_MESSAGE >> 20} MiB")
        if self._n_containers > MOST_CONTAINERS:
            raise MessageTooLarge(f"a message of more than {MOST_CONTAINERS} objects and arrays")

    def end(self) -> None:
        """Start counting the next message."""
        self._n_bytes = self._n_containers = 0


class Pace:
    """Delays a reader to `RATE`."""

    def __init__(self) -> None:
        self._left, self._at = float(RATE), time.monotonic()

    async def spend(self, n_bytes: int, n_lines: int) -> None:
        now = time.monotonic()
        self._left = min(RATE, self._left + (now - self._at) * RATE) - n_bytes - _LINE_COST * n_lines
        self._at = now
        if self._left < 0:
            await asyncio.sleep(-self._left / RATE)


async def pass_bounded(received: Received, to_session: ObjectSendStream[SessionMessage | Exception]) -> None:
    """Forward messages. One with too many objects is dropped, and the request it answers fails."""
    async with received, to_session:
        try:
            async for message in received:
                if passed := _bounded(message):
                    await to_session.send(passed)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            pass


def _bounded(message: SessionMessage | Exception) -> SessionMessage | Exception | None:
    if isinstance(message, Exception):
        return message
    payload = message.message
    if isinstance(payload, types.JSONRPCResponse):
        if _count_objects(payload.result) > MOST_OBJECTS:
            error = types.ErrorData(code=types.INTERNAL_ERROR, message=f"a result of more than {MOST_OBJECTS} objects")
            return SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=payload.id, error=error))
    elif not isinstance(payload, types.JSONRPCError) and _count_objects(payload.params) > MOST_OBJECTS:
        return None
    return message


def _count_objects(value: Any) -> int:
    """Return the number of objects in a JSON value; stop counting above MOST_OBJECTS."""
    todo, n = [value], 0
    while todo and n <= MOST_OBJECTS:
        one = todo.pop()
        if isinstance(one, dict):
            n += 1
            todo += [inner for key, inner in one.items() if key not in _UNCHECKED and isinstance(inner, (dict, list))]
        elif isinstance(one, list):
            todo += [inner for inner in one if isinstance(inner, (dict, list))]
    return n
