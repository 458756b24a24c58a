"""Framing: split a stream of the wire into messages without changing it, for a proxy.

`llamado.rpc.wire` reads messages strictly and returns values. Here a message is bytes in transit: only the framing must
be right, which is the same in every version of the protocol, and even noise is passed on unchanged.
"""

from __future__ import annotations

import struct
from collections import deque

from llamado.rpc import wire

REQUEST_HEAD, RESPONSE_HEAD = struct.Struct("<BQ"), struct.Struct("<Q")
GRAPHS = frozenset({wire.Command.GRAPH_COMPUTE, wire.Command.GRAPH_RECOMPUTE})
DELAYED = GRAPHS | {wire.Command.DELIVER}
"""Commands that a link delays: graphs to a worker, and tensors from one worker to the next."""
ANSWERED = frozenset(command for command in wire.Command if wire.has_response(command))
_COMMANDS = frozenset(wire.Command)
_KEPT_ELSE = 4096


def _kept_bytes(message: wire.Message) -> int:
    """Return the bytes to keep of a payload: all of lists and delayed messages, and no bulk data of others."""
    if message.command in DELAYED or message.layout.size is None:
        return wire.MAX_MESSAGE
    return message.layout.size if message.has_data else _KEPT_ELSE


_KEPT = {message.command: _kept_bytes(message) for message in wire.MESSAGES}


def is_command(command: int | None) -> bool:
    """Return True if the protocol has a command of this number."""
    return command in _COMMANDS


def command_name(command: int | None) -> str:
    """Return the name of a command, also for unknown numbers."""
    if command is None:
        return "nothing"
    try:
        return wire.Command(command).name
    except ValueError:
        return f"command {command}"


class Message:
    """One message in transit. Times are those of the clock passed to `take`.

    `command` is None for a response to no request. `kept` is the head and as much of the payload as the trace needs.
    `first` counts the bytes in the first read.
    """

    __slots__ = (
        "_end",
        "_head",
        "_kept_end",
        "began",
        "command",
        "completed_head",
        "due",
        "ended",
        "first",
        "kept",
        "request",
        "seen",
    )  # fmt: skip

    def __init__(self, head: struct.Struct, command: int | None, began: float, request: Message | None = None) -> None:
        self.command = command
        self.request = request
        self.began = self.ended = began
        self.due = began
        """Time at which the last byte is sent on."""
        self.completed_head = False
        """True if the last `take` completed the head."""
        self.kept = bytearray()
        self.seen = 0
        self.first = 0
        self._head = head
        self._end = self._kept_end = head.size

    @property
    def has_head(self) -> bool:
        """True once the head is complete."""
        return self.seen >= self._head.size

    @property
    def is_complete(self) -> bool:
        """True once the last byte was received."""
        return self.seen == self._end and self.has_head

    @property
    def size(self) -> int:
        """Bytes with the head. Valid once the head is complete."""
        return self._end

    @property
    def payload(self) -> memoryview:
        """The kept part of the payload."""
        return memoryview(self.kept)[self._head.size :]

    @property
    def is_kept_whole(self) -> bool:
        """True if all bytes are, or will be, kept."""
        return self.has_head and self._kept_end == self._end

    def take(self, data: memoryview, now: float) -> int:
        """Record the message's bytes at the start of `data`. Returns their number."""
        taken = 0
        self.completed_head = False
        if not self.has_head:
            taken = min(self._head.size - self.seen, len(data))
            self.kept += data[:taken]
            self.seen += taken
            if self.has_head:
                self.completed_head = True
                size: int = self._head.unpack_from(self.kept)[-1]
                self._end += size
                self._kept_end += min(size, _kept(self.command))
        if self.has_head:
            n = min(self._end - self.seen, len(data) - taken)
            keep = min(self._kept_end - self.seen, n)
            if keep > 0:
                self.kept += data[taken : taken + keep]
            self.seen += n
            taken += n
        if self.first == 0:
            self.first = taken
        self.ended = now
        return taken


def _kept(command: int | None) -> int:
    return _KEPT[wire.Command(command)] if command in _COMMANDS else _KEPT_ELSE


class RequestFramer:
    """Splits a client's stream into messages."""

    def __init__(self, awaiting: deque[Message]) -> None:
        self._awaiting = awaiting
        self.unfinished: Message | None = None
        """The message that is not complete yet."""

    def take(self, data: memoryview, now: float) -> tuple[Message, int]:
        """Return the message at the start of `data` (not empty), and the number of its bytes there.

        A request with a response joins `awaiting` at its first byte, before the worker can respond.
        """
        message = self.unfinished
        if message is None:
            message = Message(REQUEST_HEAD, data[0], now)
            if message.command in ANSWERED or not is_command(message.command):
                self._awaiting.append(message)
        n = message.take(data, now)
        self.unfinished = None if message.is_complete else message
        return message, n


class ResponseFramer:
    """Splits a worker's stream into messages. `awaiting`: requests without a response so far, in order."""

    def __init__(self, awaiting: deque[Message]) -> None:
        self._awaiting = awaiting
        self.unfinished: Message | None = None
        """The message that is not complete yet."""
        self.lost = False
        """True after a response to no request or to an unknown one: the rest of the stream cannot be split."""

    def take(self, data: memoryview, now: float) -> tuple[Message, int] | None:
        """Return the message at the start of `data` and the number of its bytes, None once responses are `lost`."""
        if self.lost:
            return None
        message = self.unfinished
        if message is None:
            request = self._awaiting.popleft() if self._awaiting else None
            if request is None or request.command not in ANSWERED:
                self.lost = True
                return None
            message = Message(RESPONSE_HEAD, request.command, now, request)
        n = message.take(data, now)
        self.unfinished = None if message.is_complete else message
        return message, n
