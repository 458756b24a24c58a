"""Streams of the wire cut into messages without being changed, for programs that pass them on.

`llamado.rpc.wire` reads messages strictly and hands out values. Here a message is bytes on their way: all that must be
right is the framing, which is the same in every version of the protocol, and even noise comes out as it came in.
"""

from __future__ import annotations

import struct
from collections import deque

from llamado.rpc import wire

REQUEST_HEAD, RESPONSE_HEAD = struct.Struct("<BQ"), struct.Struct("<Q")
GRAPHS = frozenset({wire.Command.GRAPH_COMPUTE, wire.Command.GRAPH_RECOMPUTE})
DELAYED = GRAPHS | {wire.Command.DELIVER}
"""What takes a link's time: a graph on its way to a worker, and what one worker passes to the next."""
ANSWERED = frozenset(command for command in wire.Command if wire.has_response(command))
_COMMANDS = frozenset(wire.Command)
_KEPT_ELSE = 4096


def _kept_bytes(message: wire.Message) -> int:
    """Return the bytes to keep of a payload: all of lists and delayed messages, and no bulk data of others."""
    if message.command in DELAYED or message.layout.size is None:
        return wire.MAX_MESSAGE
    return message.layout.size if message.has_data else _KEPT_ELSE


_KEPT = {message.command: _kept_bytes(message) for message in wire.MESSAGES}


def known(command: int | None) -> bool:
    """Whether the protocol has a command of this number."""
    return command in _COMMANDS


def command_name(command: int | None) -> str:
    """As in the table of the protocol; also of numbers that are not in it."""
    if command is None:
        return "nothing"
    try:
        return wire.Command(command).name
    except ValueError:
        return f"command {command}"


class Message:
    """One message on its way. Times are those of the clock that `take` is given.

    `command` is None for a response that answers no request. `kept` is the head and as much of the payload as is worth
    a look. `first` counts the bytes of the first read that brought some of it.
    """

    __slots__ = (
        "_end", "_head", "_kept_end", "began", "command", "due", "ended", "first", "just_headed", "kept", "request",
        "seen",
    )  # fmt: skip

    def __init__(self, head: struct.Struct, command: int | None, began: float, request: Message | None = None) -> None:
        self.command = command
        self.request = request
        self.began = self.ended = began
        self.due = began
        """When its last byte is handed on."""
        self.just_headed = False
        """Whether the last `take` completed the head."""
        self.kept = bytearray()
        self.seen = 0
        self.first = 0
        self._head = head
        self._end = self._kept_end = head.size

    @property
    def headed(self) -> bool:
        """Whether the head is complete."""
        return self.seen >= self._head.size

    @property
    def done(self) -> bool:
        """Whether the last byte has come."""
        return self.seen == self._end and self.headed

    @property
    def size(self) -> int:
        """Bytes with the head; of no use before that is complete."""
        return self._end

    @property
    def payload(self) -> memoryview:
        """What was kept of the payload."""
        return memoryview(self.kept)[self._head.size :]

    @property
    def whole(self) -> bool:
        """Whether all of it is (or will be) kept."""
        return self.headed and self._kept_end == self._end

    def take(self, data: memoryview, now: float) -> int:
        """Takes note of its bytes at the start of `data`; gives how many they are."""
        taken = 0
        self.just_headed = False
        if not self.headed:
            taken = min(self._head.size - self.seen, len(data))
            self.kept += data[:taken]
            self.seen += taken
            if self.headed:
                self.just_headed = True
                size: int = self._head.unpack_from(self.kept)[-1]
                self._end += size
                self._kept_end += min(size, _kept(self.command))
        if self.headed:
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


class Requests:
    """Cuts what a client sends."""

    def __init__(self, awaiting: deque[Message]) -> None:
        self._awaiting = awaiting
        self.unfinished: Message | None = None
        """The message whose end has not come."""

    def take(self, data: memoryview, now: float) -> tuple[Message, int]:
        """The message that `data` (not empty) begins in, and how many of the bytes are its.

        A request that will be answered is put among those `awaiting` at its first byte, so before the worker can
        answer it.
        """
        message = self.unfinished
        if message is None:
            message = Message(REQUEST_HEAD, data[0], now)
            if message.command in ANSWERED or not known(message.command):
                self._awaiting.append(message)
        n = message.take(data, now)
        self.unfinished = None if message.done else message
        return message, n


class Responses:
    """Cuts what a worker sends; `awaiting` tells which request a response answers."""

    def __init__(self, awaiting: deque[Message]) -> None:
        self._awaiting = awaiting
        self.unfinished: Message | None = None
        """The message whose end has not come."""
        self.lost = False
        """A response came to no request, or to one that is not known: from there on nothing can be told apart."""

    def take(self, data: memoryview, now: float) -> tuple[Message, int] | None:
        """As of Requests; None once responses are `lost`."""
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
        self.unfinished = None if message.done else message
        return message, n
