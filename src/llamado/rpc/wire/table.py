"""The table of messages: number, payload layout, response and description of every request.

The reader, the writer, the log of requests, the tap and the worker's dispatch all work from its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llamado.ggml.ops import MAX_NAME, MAX_SRC
from llamado.rpc.wire import messages as m
from llamado.rpc.wire.graph import HEAD, GraphLayout
from llamado.rpc.wire.layouts import (
    ONE_TENSOR,
    U32,
    U64,
    Entries,
    Fields,
    Layout,
    Numbers,
    TensorNumbers,
    TicketEndpoint,
    name,
    number,
    tensors,
)
from llamado.rpc.wire.messages import Command

__all__ = [
    "COMMANDS",
    "DATA",
    "DATA_RESPONSE",
    "MESSAGES",
    "Message",
    "ResponseForm",
    "describe",
    "printable",
    "response_form",
]

SIZE = Numbers("Q")
"""Payload size in front of every response."""


@dataclass(frozen=True, eq=False)
class ResponseForm:
    """The response to a request: its class and layout."""

    kind: type[Any]
    layout: Numbers

    def encode(self, response: m.Response) -> bytes:
        """Return the bytes of a response."""
        return SIZE.pack((self.layout.size,)) + self.layout.pack(response)


@dataclass(frozen=True, eq=False)
class DataForm(ResponseForm):
    """A response of as many bytes as the request asks for, sent as bulk behind the size."""

    def encode(self, response: m.Response) -> bytes:
        return self.layout.pack(response)


@dataclass(frozen=True, eq=False)
class Message:
    """One row: a request without bulk data.

    `text`: format of the description, with fields of the request by name; None lists all of them. `response`: None if
    there is none. `majors`: versions of the protocol that have this row.
    """

    command: Command
    kind: type[Any]
    layout: Layout
    response: ResponseForm | None = None
    text: str | None = None
    majors: tuple[int, ...] = (7, 8)

    has_data = False
    """True if bulk data follows the payload."""

    def encode(self, request: Any) -> bytes:
        """Return the bytes of a request, without its bulk data."""
        payload = self.layout.pack(request)
        return HEAD.pack(self.command, len(payload)) + payload

    def decode(self, payload: bytes, bulk: int) -> Any:
        """Return the request in a payload that `bulk` bytes of data follow. Raises WireError."""
        return self.kind(*self.layout.unpack(payload))

    def fault(self, size: int) -> str | None:
        """Return the expected size in words if the request cannot have `size` bytes, None if it can."""
        return self.layout.fault(size)

    def describe(self, request: Any) -> str:
        """Return a request in one printable line."""
        fields: tuple[str, ...] = self.kind.__match_args__
        text = " ".join(f"{field} {{{field}}}" for field in fields) if self.text is None else self.text
        words = text.format(**{field: _words(getattr(request, field)) for field in fields})
        return printable(f"{self.command.name} {words}").rstrip()


class DataMessage(Message):
    """A request with `size` bytes of bulk data. That is its last value, and the payload does not hold it."""

    has_data = True

    def encode(self, request: Any) -> bytes:
        payload = self.layout.pack(request)
        return HEAD.pack(self.command, len(payload) + request.size) + payload

    def decode(self, payload: bytes, bulk: int) -> Any:
        return self.kind(*self.layout.unpack(payload), bulk)

    def fault(self, size: int) -> str | None:
        least = self.layout.size or 0
        return None if size >= least else f"it has {least} and the data"


class RowsMessage(DataMessage):
    """A request with bulk data whose number of bytes follows from the values."""

    def decode(self, payload: bytes, bulk: int) -> Any:
        request = self.kind(*self.layout.unpack(payload))
        if not bulk or request.size != bulk:
            raise m.WireError(f"{self.command.name} of {request.rows} · {request.row} bytes came with {bulk}")
        return request


U8_RESPONSE, U32_RESPONSE, U64_RESPONSE = (ResponseForm(m.Number, Numbers(form)) for form in "BIQ")
DATA_RESPONSE = DataForm(m.TensorData, SIZE)

_AT_BYTES = "{tensor}, {size} bytes at {offset}"
_GRAPH = "device {device}, uid {uid}, {nodes} nodes, {tensors} tensors"
_ROWS = "{tensor}, {rows} times {row} bytes, {stride} apart, from {offset}"

MESSAGES: tuple[Message, ...] = (
    # The worker and its devices. No text: capabilities are of no use in a log, and tickets are secrets.
    Message(Command.HELLO, m.Hello, Numbers(f"{m.CAPS_BYTES}s"),
            ResponseForm(m.HelloResponse, Numbers(f"4B{m.CAPS_BYTES}s")), ""),
    Message(Command.UPGRADE, m.Upgrade, Numbers("I")),
    Message(Command.DEVICE_COUNT, m.DeviceCount, Numbers(""), U32_RESPONSE),
    Message(Command.GET_ALIGNMENT, m.GetAlignment, Numbers("I"), U64_RESPONSE),
    Message(Command.GET_MAX_SIZE, m.GetMaxSize, Numbers("I"), U64_RESPONSE),
    Message(Command.GET_DEVICE_MEMORY, m.GetDeviceMemory, Numbers("I"), ResponseForm(m.DeviceMemory, Numbers("QQ"))),
    Message(Command.GET_ALLOC_SIZE, m.GetAllocSize, Fields(U32, ONE_TENSOR, tensors(MAX_SRC)), U64_RESPONSE,
            "{tensor}"),
    Message(Command.GET_NUMERICS, m.GetNumerics, Numbers("I"),
            ResponseForm(m.Numerics, Numbers(f"{m.NUMERICS_BYTES}s"))),
    # Buffers.
    Message(Command.ALLOC_BUFFER, m.AllocBuffer, Numbers("IQ"), ResponseForm(m.AllocResponse, Numbers("QQ"))),
    Message(Command.BUFFER_GET_BASE, m.BufferGetBase, Numbers("Q"), U64_RESPONSE),
    Message(Command.FREE_BUFFER, m.FreeBuffer, Numbers("Q")),
    Message(Command.BUFFER_CLEAR, m.BufferClear, Numbers("QB")),
    # Tensors.
    DataMessage(Command.SET_TENSOR, m.SetTensor, TensorNumbers("BQ"), text=_AT_BYTES),
    RowsMessage(Command.SET_TENSOR_2D, m.SetTensor2D, TensorNumbers("QQQQ"), text=_ROWS, majors=(8,)),
    Message(Command.SET_TENSOR_HASH, m.SetTensorHash, TensorNumbers("QQ"), U8_RESPONSE,
            "{tensor}, hash {hash:016x} at {offset}"),
    Message(Command.GET_TENSOR, m.GetTensor, TensorNumbers("QQ"), DATA_RESPONSE, _AT_BYTES),
    Message(Command.GET_TENSOR_2D, m.GetTensor2D, TensorNumbers("QQQQ"), DATA_RESPONSE, _ROWS, majors=(8,)),
    Message(Command.COPY_TENSOR, m.CopyTensor, Fields(ONE_TENSOR, ONE_TENSOR), U8_RESPONSE, "{src} to {dst}"),
    Message(Command.INIT_TENSOR, m.InitTensor, TensorNumbers(), text="{tensor}"),
    Message(Command.MEMSET_TENSOR, m.MemsetTensor, TensorNumbers("QQB"), text=f"{_AT_BYTES} to {{value}}"),
    # Weights in the worker's own files.
    Message(Command.OFFER, m.Offer, Entries(m.OfferedWeight, Fields(name(MAX_NAME), U64)), DATA_RESPONSE,
            "{weights} weights"),
    Message(Command.BIND, m.Bind,
            Entries(m.BoundWeight, Fields(U64, U64, U64, number(f"{m.SHA256_BYTES}s"), name(MAX_NAME))), DATA_RESPONSE,
            "{weights} weights"),
    # Graphs.
    Message(Command.GRAPH_COMPUTE, m.GraphCompute, GraphLayout(has_uid=False), text=_GRAPH, majors=(7,)),
    Message(Command.GRAPH_COMPUTE, m.GraphCompute, GraphLayout(has_uid=True), text=_GRAPH, majors=(8,)),
    Message(Command.GRAPH_RECOMPUTE, m.GraphRecompute, Numbers("I"), majors=(7,)),
    Message(Command.GRAPH_RECOMPUTE, m.GraphRecompute, Numbers("IQ"), majors=(8,)),
    # Sums over two devices.
    Message(Command.COMM_INIT, m.CommInit, Fields(U32, U32, U32, U32, name(m.MAX_HOST)), U8_RESPONSE,
            "device {device} is {rank} of {world} at {host}:{port}", majors=(8,)),
    Message(Command.COMM_ALLREDUCE, m.CommAllReduce, Fields(U32, ONE_TENSOR), text="device {device}, {tensor}",
            majors=(8,)),
    Message(Command.COMM_FREE, m.CommFree, Numbers("I"), majors=(8,)),
    # Links to other workers.
    Message(Command.OPEN_INLET, m.OpenInlet, Numbers(""), ResponseForm(m.InletTicket, Numbers(f"I{m.TICKET_BYTES}s"))),
    Message(Command.CLOSE_INLET, m.CloseInlet, Numbers(f"{m.TICKET_BYTES}s"), text=""),
    Message(Command.CONNECT_NEXT, m.ConnectNext, TicketEndpoint(), U32_RESPONSE, "{endpoint}"),
    Message(Command.ATTACH, m.Attach, Numbers(f"{m.TICKET_BYTES}s"), U8_RESPONSE, ""),
    Message(Command.PUSH, m.Push, TensorNumbers("IQQ"), text="{tensor}, {size} bytes by link {link}: {sequence}"),
    Message(Command.AWAIT, m.Await, TensorNumbers("IQQ"), ResponseForm(m.AwaitResponse, Numbers("BQ")),
            "{tensor}, {size} bytes by inlet {inlet}: {sequence}"),
    DataMessage(Command.DELIVER, m.Deliver, Numbers("QQ")),
)  # fmt: skip

_BY_COMMAND = {message.command: message for message in MESSAGES}
COMMANDS: dict[type[Any], Command] = {message.kind: message.command for message in MESSAGES}
"""Commands by the class of their request."""
DATA = frozenset(message.command for message in MESSAGES if message.response is DATA_RESPONSE)
"""Commands whose response has as many bytes as the request asks for."""


def response_form(command: Command) -> ResponseForm | None:
    """Return the form of the response to a command, None if it has no response."""
    return _BY_COMMAND[command].response


def describe(request: Any) -> str:
    """Return a request in one printable line."""
    return _BY_COMMAND[COMMANDS[type(request)]].describe(request)


def printable(text: str) -> str:
    """Return text with a "?" for each character that is not printable, so that no name forges a log line."""
    return "".join([c if c.isprintable() else "?" for c in text])


def _words(value: Any) -> Any:
    """Return a value for a description: lists and arrays as counts."""
    match value:
        case m.WireTensor():
            return value.summary()
        case bytes():
            return value.decode("utf-8", "replace")
        case int():
            return value
        case _:
            return len(value)
