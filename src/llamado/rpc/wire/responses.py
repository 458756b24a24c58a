"""Responses as bytes, and bytes as responses."""

from __future__ import annotations

import struct
from collections import deque

from llamado.rpc.wire.buffer import MessageBuffer
from llamado.rpc.wire.messages import (
    CAPS_BYTES,
    NUMERICS_BYTES,
    TICKET_BYTES,
    Allocated,
    Awaited,
    Command,
    DeviceMemory,
    HelloResponse,
    InletTicket,
    Number,
    Numerics,
    Response,
    TensorData,
    WireError,
)

_SIZE = struct.Struct("<Q")
_U32 = struct.Struct("<I")
RESPONSES: dict[Command, tuple[struct.Struct, type]] = {
    Command.HELLO: (struct.Struct(f"<4B{CAPS_BYTES}s"), HelloResponse),
    Command.ALLOC_BUFFER: (struct.Struct("<QQ"), Allocated),
    Command.GET_DEVICE_MEMORY: (struct.Struct("<QQ"), DeviceMemory),
    Command.GET_ALIGNMENT: (_SIZE, Number),
    Command.GET_MAX_SIZE: (_SIZE, Number),
    Command.BUFFER_GET_BASE: (_SIZE, Number),
    Command.GET_ALLOC_SIZE: (_SIZE, Number),
    Command.DEVICE_COUNT: (_U32, Number),
    Command.SET_TENSOR_HASH: (struct.Struct("<B"), Number),
    Command.COPY_TENSOR: (struct.Struct("<B"), Number),
    Command.OPEN_INLET: (struct.Struct(f"<I{TICKET_BYTES}s"), InletTicket),
    Command.COMM_INIT: (struct.Struct("<B"), Number),
    Command.CONNECT_NEXT: (_U32, Number),
    Command.ATTACH: (struct.Struct("<B"), Number),
    Command.AWAIT: (struct.Struct("<BQ"), Awaited),
    Command.GET_NUMERICS: (struct.Struct(f"<{NUMERICS_BYTES}s"), Numerics),
}
"""The responses of a fixed size."""
DATA = frozenset({Command.GET_TENSOR, Command.GET_TENSOR_2D, Command.OFFER, Command.BIND})
"""What is answered with as many bytes as were asked for. Other commands have no response."""


def has_response(command: Command) -> bool:
    """Whether a command is answered."""
    return command in DATA or command in RESPONSES


def write_response(command: Command, response: Response) -> bytes:
    """The bytes of a response to `command`; TensorData's are followed by the data, which the caller sends."""
    if isinstance(response, TensorData):
        return _SIZE.pack(response.size)
    form, _ = RESPONSES[command]
    return _SIZE.pack(form.size) + form.pack(*response)


class ResponseReader(MessageBuffer):
    """The client's side: responses from bytes, in the order in which they were `expect`ed."""

    def __init__(self) -> None:
        super().__init__()
        self._expected: deque[tuple[Command, int]] = deque()

    def expect(self, command: Command, size: int = 0) -> None:
        """A request was sent whose response comes after those expected before; `size` of one in DATA."""
        if not has_response(command):
            raise ValueError(f"{command.name} has no response")
        self._expected.append((command, size))

    @property
    def n_expected(self) -> int:
        """Responses still to come."""
        return len(self._expected)

    def next(self) -> tuple[Command, Response] | None:
        """The next response and its request's command, None until more bytes come. Raises WireError."""
        if self.bulk:
            return None
        held = self._held
        if not held:
            return None
        if not self._expected:
            raise WireError("a response to no request")
        if len(held) < _SIZE.size:
            return None
        command, data = self._expected[0]
        size = _SIZE.unpack_from(held)[0]
        if command in DATA:
            if size != data:
                raise WireError(f"{command.name} gave {size} bytes of {data}")
            del held[: _SIZE.size]
            self.bulk = size
            self._expected.popleft()
            return command, TensorData(size)
        form, kind = RESPONSES[command]
        if size != form.size:
            raise WireError(f"{command.name} was answered with {size} bytes; it is {form.size}")
        end = _SIZE.size + size
        if len(held) < end:
            return None
        response: Response = kind(*form.unpack_from(held, _SIZE.size))
        del held[:end]
        self._expected.popleft()
        return command, response
