"""The wire of ggml RPC, protocol 7.0.0: bytes to messages and messages to bytes, without a socket.

A request is `command u8 | size u64 | payload`, a response `size u64 | payload`; everything is little-endian and packed
(ggml-rpc.cpp of llama.cpp b11434). Writers give bytes to send; readers are fed whatever arrived and give whole
messages. The data of a tensor never passes through a message: it follows one as *bulk*, which the shell moves from its
transport straight to where it belongs (`take` what the reader holds already, `bypass` what was read around it).
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.errors import LlamadoError
from llamado.ggml.ops import MAX_DIMS, MAX_NAME, MAX_SRC, OP_PARAMS_BYTES

VERSION = (7, 0, 0)
CAPS_BYTES = 24
"""Transport capabilities in HELLO; all zero is plain TCP."""
HASH_THRESHOLD = 10 << 20
"""Weights larger than this are asked for by hash before they are sent."""
LLAMADO = 0x4C
"""What our worker puts in the byte of HELLO's response that ggml leaves zero and never reads: it places activations
without a buffer by itself, and answers other connections while one computes.
"""
LLAMADO_LINKED = 0x4D
"""The same of one that also passes tensors to other workers of ours (the commands from OPEN_INLET on)."""
TICKET_BYTES = 16
MAX_ENDPOINT = 320
"""Most bytes of an endpoint as text: a host's name has at most 253."""
MAX_MESSAGE = 64 << 20
"""Most bytes of a request that is read into memory (a graph of 200,000 tensors; bulk does not count)."""


class WireError(LlamadoError):
    """Bytes that are not the protocol, or a message that breaks its rules: the connection is of no more use."""


class Command(IntEnum):
    """The first byte of a request."""

    ALLOC_BUFFER = 0
    GET_ALIGNMENT = 1
    GET_MAX_SIZE = 2
    BUFFER_GET_BASE = 3
    FREE_BUFFER = 4
    BUFFER_CLEAR = 5
    SET_TENSOR = 6
    SET_TENSOR_HASH = 7
    GET_TENSOR = 8
    COPY_TENSOR = 9
    GRAPH_COMPUTE = 10
    GET_DEVICE_MEMORY = 11
    INIT_TENSOR = 12
    GET_ALLOC_SIZE = 13
    HELLO = 14
    DEVICE_COUNT = 15
    GRAPH_RECOMPUTE = 16
    MEMSET_TENSOR = 17
    # Ours, between workers and clients that are LLAMADO_LINKED; far from ggml's, which go on counting.
    OPEN_INLET = 0x40
    CONNECT_NEXT = 0x41
    ATTACH = 0x42
    PUSH = 0x43
    AWAIT = 0x44
    DELIVER = 0x45
    CLOSE_INLET = 0x46


TENSOR = np.dtype(
    [
        ("id", "<u8"),
        ("type", "<u4"),
        ("buffer", "<u8"),
        ("ne", "<u4", MAX_DIMS),
        ("nb", "<u4", MAX_DIMS),
        ("op", "<u4"),
        ("op_params", f"V{OP_PARAMS_BYTES}"),
        ("flags", "<i4"),
        ("src", "<u8", MAX_SRC),
        ("view_src", "<u8"),
        ("view_offs", "<u8"),
        ("data", "<u8"),
        ("name", f"S{MAX_NAME}"),
        ("use_count", "<i4"),
    ]
)
"""A tensor as it travels, 296 bytes. `buffer` and `data` are the worker's own numbers, 0 where it has no memory."""

_TENSOR = struct.Struct(f"<QIQ{MAX_DIMS}I{MAX_DIMS}II{OP_PARAMS_BYTES}si{MAX_SRC}QQQQ{MAX_NAME}si")
assert _TENSOR.size == TENSOR.itemsize == 296


class WireTensor(NamedTuple):
    """One tensor of a request; see TENSOR."""

    id: int
    type: int
    buffer: int
    ne: tuple[int, int, int, int]
    nb: tuple[int, int, int, int]
    data: int
    op: int = 0
    op_params: bytes = bytes(OP_PARAMS_BYTES)
    flags: int = 0
    src: tuple[int, ...] = (0,) * MAX_SRC
    view_src: int = 0
    view_offs: int = 0
    name: bytes = b""
    use_count: int = 0

    def pack(self) -> bytes:
        """The 296 bytes; a name that is too long is cut, leaving its closing zero."""
        return _TENSOR.pack(
            self.id, self.type, self.buffer, *self.ne, *self.nb, self.op, self.op_params, self.flags, *self.src,
            self.view_src, self.view_offs, self.data, self.name[: MAX_NAME - 1], self.use_count,
        )  # fmt: skip

    @classmethod
    def unpack(cls, payload: bytes | memoryview, at: int = 0) -> WireTensor:
        v = _TENSOR.unpack_from(payload, at)
        return cls(
            id=v[0], type=v[1], buffer=v[2], ne=v[3:7], nb=v[7:11], op=v[11], op_params=v[12], flags=v[13],
            src=v[14:24], view_src=v[24], view_offs=v[25], data=v[26], name=v[27].split(b"\0", 1)[0], use_count=v[28],
        )  # fmt: skip


# --- requests ---------------------------------------------------------------------------------------------------------


class Hello(NamedTuple):
    """Must be the first request of a connection."""

    caps: bytes = bytes(CAPS_BYTES)


class DeviceCount(NamedTuple):
    pass


class AllocBuffer(NamedTuple):
    device: int
    size: int


class GetAlignment(NamedTuple):
    device: int


class GetMaxSize(NamedTuple):
    device: int


class GetDeviceMemory(NamedTuple):
    device: int


class GraphRecompute(NamedTuple):
    """Runs the device's last graph again. No response."""

    device: int


class BufferGetBase(NamedTuple):
    ptr: int


class FreeBuffer(NamedTuple):
    """No response."""

    ptr: int


class BufferClear(NamedTuple):
    """No response."""

    ptr: int
    value: int


class SetTensor(NamedTuple):
    """Followed by `size` bytes of bulk for byte `offset` of the tensor. No response.

    `cache_flag` not 0: keep a copy on disk under the data's hash.
    """

    tensor: WireTensor
    cache_flag: int
    offset: int
    size: int


class SetTensorHash(NamedTuple):
    """Asks for the bytes with FNV-1a `hash` to be put at byte `offset` of the tensor."""

    tensor: WireTensor
    offset: int
    hash: int


class GetTensor(NamedTuple):
    tensor: WireTensor
    offset: int
    size: int


class CopyTensor(NamedTuple):
    src: WireTensor
    dst: WireTensor


class InitTensor(NamedTuple):
    """No response."""

    tensor: WireTensor


class MemsetTensor(NamedTuple):
    """No response."""

    tensor: WireTensor
    offset: int
    size: int
    value: int


class GetAllocSize(NamedTuple):
    device: int
    tensor: WireTensor
    srcs: tuple[WireTensor, ...]


class OpenInlet(NamedTuple):
    """Asks for a ticket with which another worker may send tensors to this client's memory."""


class ConnectNext(NamedTuple):
    """Asks a worker to connect to the one at `endpoint` and to `Attach` there; the answer is link 0 where it cannot."""

    ticket: bytes
    endpoint: bytes


class Attach(NamedTuple):
    """From now on this connection carries `Deliver` alone, for the client who got the ticket."""

    ticket: bytes


class Push(NamedTuple):
    """Sends the first `size` bytes of a tensor by a link, once all before it is done. No response."""

    tensor: WireTensor
    link: int
    size: int
    sequence: int


class Await(NamedTuple):
    """Waits for the `Deliver` of this number by an inlet, and puts its `size` bytes at the start of the tensor."""

    tensor: WireTensor
    inlet: int
    size: int
    sequence: int


class Deliver(NamedTuple):
    """Followed by `size` bytes of bulk. No response; numbers ascend. `computed`: see Awaited."""

    sequence: int
    computed: int
    size: int


class CloseInlet(NamedTuple):
    """Ends an inlet, by any connection: neither who sends by it nor who waits for something waits any longer. No
    response.
    """

    ticket: bytes


@dataclass(frozen=True, eq=False)
class GraphCompute:
    """A graph: `nodes` are the ids u64[n_nodes] in order, `tensors` TENSOR[n_tensors] all they need. No response.

    `payload` is the whole request's payload, of which the arrays are views: equal payloads are equal graphs.
    """

    device: int
    nodes: NDArray[np.uint64]
    tensors: NDArray[Any]
    payload: bytes


Request = (
    Hello | DeviceCount | AllocBuffer | GetAlignment | GetMaxSize | GetDeviceMemory | GraphRecompute | BufferGetBase
    | FreeBuffer | BufferClear | SetTensor | SetTensorHash | GetTensor | CopyTensor | InitTensor | MemsetTensor
    | GetAllocSize | GraphCompute | OpenInlet | ConnectNext | Attach | Push | Await | Deliver | CloseInlet
)  # fmt: skip

COMMANDS: dict[type, Command] = {
    Hello: Command.HELLO,
    DeviceCount: Command.DEVICE_COUNT,
    AllocBuffer: Command.ALLOC_BUFFER,
    GetAlignment: Command.GET_ALIGNMENT,
    GetMaxSize: Command.GET_MAX_SIZE,
    GetDeviceMemory: Command.GET_DEVICE_MEMORY,
    GraphRecompute: Command.GRAPH_RECOMPUTE,
    BufferGetBase: Command.BUFFER_GET_BASE,
    FreeBuffer: Command.FREE_BUFFER,
    BufferClear: Command.BUFFER_CLEAR,
    SetTensor: Command.SET_TENSOR,
    SetTensorHash: Command.SET_TENSOR_HASH,
    GetTensor: Command.GET_TENSOR,
    CopyTensor: Command.COPY_TENSOR,
    InitTensor: Command.INIT_TENSOR,
    MemsetTensor: Command.MEMSET_TENSOR,
    GetAllocSize: Command.GET_ALLOC_SIZE,
    GraphCompute: Command.GRAPH_COMPUTE,
    OpenInlet: Command.OPEN_INLET,
    ConnectNext: Command.CONNECT_NEXT,
    Attach: Command.ATTACH,
    Push: Command.PUSH,
    Await: Command.AWAIT,
    Deliver: Command.DELIVER,
    CloseInlet: Command.CLOSE_INLET,
}

_HEAD = struct.Struct("<BQ")
_SIZE = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_GRAPH = struct.Struct("<II")
_T = TENSOR.itemsize
_SET = _T + 9  # the tensor, the flag and the offset in front of SET_TENSOR's data
_DELIVER = struct.Struct("<QQ")

# Payloads that are a few numbers.
_PLAIN: dict[Command, tuple[struct.Struct, type]] = {
    Command.HELLO: (struct.Struct(f"<{CAPS_BYTES}s"), Hello),
    Command.DEVICE_COUNT: (struct.Struct("<"), DeviceCount),
    Command.ALLOC_BUFFER: (struct.Struct("<IQ"), AllocBuffer),
    Command.GET_ALIGNMENT: (_U32, GetAlignment),
    Command.GET_MAX_SIZE: (_U32, GetMaxSize),
    Command.GET_DEVICE_MEMORY: (_U32, GetDeviceMemory),
    Command.GRAPH_RECOMPUTE: (_U32, GraphRecompute),
    Command.BUFFER_GET_BASE: (_SIZE, BufferGetBase),
    Command.FREE_BUFFER: (_SIZE, FreeBuffer),
    Command.BUFFER_CLEAR: (struct.Struct("<QB"), BufferClear),
    Command.OPEN_INLET: (struct.Struct("<"), OpenInlet),
    Command.ATTACH: (struct.Struct(f"<{TICKET_BYTES}s"), Attach),
    Command.CLOSE_INLET: (struct.Struct(f"<{TICKET_BYTES}s"), CloseInlet),
}
# Payloads that are one tensor and a few numbers.
_ONE_TENSOR: dict[Command, tuple[struct.Struct, type]] = {
    Command.SET_TENSOR_HASH: (struct.Struct("<QQ"), SetTensorHash),
    Command.GET_TENSOR: (struct.Struct("<QQ"), GetTensor),
    Command.INIT_TENSOR: (struct.Struct("<"), InitTensor),
    Command.MEMSET_TENSOR: (struct.Struct("<QQB"), MemsetTensor),
    Command.PUSH: (struct.Struct("<IQQ"), Push),
    Command.AWAIT: (struct.Struct("<IQQ"), Await),
}
_ALLOC_SIZE = 4 + (1 + MAX_SRC) * _T

# What stands before the data of commands that have some.
_BEFORE_BULK = {Command.SET_TENSOR: _SET, Command.DELIVER: _DELIVER.size}

_SIZES: dict[Command, int] = (
    {command: form.size for command, (form, _) in _PLAIN.items()}
    | {command: _T + form.size for command, (form, _) in _ONE_TENSOR.items()}
    | {Command.COPY_TENSOR: 2 * _T, Command.GET_ALLOC_SIZE: _ALLOC_SIZE}
)


def write_request(request: Request) -> bytes:
    """The bytes of a request; SET_TENSOR's and DELIVER's are followed by `size` bytes of data, which the caller sends.

    >>> write_request(GetAlignment(0)).hex()
    '01040000000000000000000000'
    """
    command = COMMANDS[type(request)]
    if isinstance(request, SetTensor):
        head = _HEAD.pack(command, _SET + request.size)
        return head + request.tensor.pack() + struct.pack("<BQ", request.cache_flag, request.offset)
    if isinstance(request, Deliver):
        head = _HEAD.pack(command, _DELIVER.size + request.size)
        return head + _DELIVER.pack(request.sequence, request.computed)
    payload: bytes
    if isinstance(request, GraphCompute):
        payload = request.payload
    elif isinstance(request, ConnectNext):
        payload = request.ticket + request.endpoint
    elif isinstance(request, CopyTensor):
        payload = request.src.pack() + request.dst.pack()
    elif isinstance(request, GetAllocSize):
        srcs = b"".join(t.pack() for t in request.srcs)
        payload = _U32.pack(request.device) + request.tensor.pack() + srcs.ljust(MAX_SRC * _T, b"\0")
    elif command in _PLAIN:
        payload = _PLAIN[command][0].pack(*request)
    else:
        assert isinstance(request, SetTensorHash | GetTensor | InitTensor | MemsetTensor | Push | Await)
        payload = request.tensor.pack() + _ONE_TENSOR[command][0].pack(*request[1:])
    return _HEAD.pack(command, len(payload)) + payload


def graph_request(device: int, nodes: NDArray[np.uint64], tensors: NDArray[Any]) -> GraphCompute:
    """A GRAPH_COMPUTE of ids u64[n_nodes] and TENSOR[n_tensors]."""
    payload = b"".join(
        (_GRAPH.pack(device, len(nodes)), nodes.astype("<u8").tobytes(), _U32.pack(len(tensors)), tensors.tobytes())
    )
    return read_graph(payload)


def read_graph(payload: bytes) -> GraphCompute:
    """A graph from GRAPH_COMPUTE's payload, without a copy. Raises WireError for counts that do not fit its size."""
    size = len(payload)
    if size < _GRAPH.size + 4:
        raise WireError(f"GRAPH_COMPUTE of {size} bytes is too short")
    device, n_nodes = _GRAPH.unpack_from(payload)
    at = _GRAPH.size + 8 * n_nodes
    if size < at + 4:
        raise WireError(f"GRAPH_COMPUTE of {size} bytes cannot hold {n_nodes} nodes")
    n_tensors = _U32.unpack_from(payload, at)[0]
    if size != at + 4 + n_tensors * _T:
        raise WireError(f"GRAPH_COMPUTE of {size} bytes does not hold {n_nodes} nodes and {n_tensors} tensors")
    nodes = np.frombuffer(payload, "<u8", n_nodes, _GRAPH.size)
    tensors = np.frombuffer(payload, TENSOR, n_tensors, at + 4)
    return GraphCompute(device, nodes, tensors, payload)


class _MessageBuffer:
    """Bytes that arrived and were not used yet, and how much bulk comes before the next message."""

    def __init__(self) -> None:
        self._held = bytearray()
        self.bulk = 0
        """Bytes of the last message's data that are still to come or to be taken."""

    @property
    def held(self) -> int:
        """Bytes that were fed and not used yet."""
        return len(self._held)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Bytes as they arrived, cut anywhere."""
        self._held += data

    def take(self, target: memoryview) -> int:
        """Moves bulk that is here already into `target`; gives how many bytes."""
        n = min(self.bulk, len(self._held), len(target))
        if n:
            target[:n] = memoryview(self._held)[:n]
            del self._held[:n]
            self.bulk -= n
        return n

    def drop(self) -> int:
        """Throws away bulk that is here already; gives how many bytes."""
        n = min(self.bulk, len(self._held))
        del self._held[:n]
        self.bulk -= n
        return n

    def bypass(self, n: int) -> None:
        """`n` bytes of bulk were read around this reader, straight from the transport. Only when none are `held`."""
        if self._held or n > self.bulk:
            raise ValueError(f"{n} bytes of {self.bulk} cannot have come, {len(self._held)} are held")
        self.bulk -= n


class RequestReader(_MessageBuffer):
    """The worker's side: requests from bytes. `max_message` bounds what is held in memory for one."""

    def __init__(self, max_message: int = MAX_MESSAGE) -> None:
        super().__init__()
        self._max_message = max_message
        self._greeted = False

    def next(self) -> Request | None:
        """The next request, None until more bytes come. Raises WireError; nothing may be read after that."""
        if self.bulk:
            return None
        held = self._held
        if not held:
            return None
        try:
            command = Command(held[0])
        except ValueError:
            raise WireError(f"command {held[0]} is not known") from None
        if not self._greeted and command is not Command.HELLO:
            raise WireError(f"{command.name} before HELLO")
        if len(held) < _HEAD.size:
            return None
        size = _HEAD.unpack_from(held)[1]
        expected = _SIZES.get(command)
        if expected is not None and size != expected:
            raise WireError(f"{command.name} of {size} bytes; it has {expected}")
        before = _BEFORE_BULK.get(command)
        if before is not None:
            if size < before:
                raise WireError(f"{command.name} of {size} bytes; it has {before} and the data")
            size, bulk = before, size - before
        else:
            bulk = 0
            if command is Command.CONNECT_NEXT and not TICKET_BYTES < size <= TICKET_BYTES + MAX_ENDPOINT:
                raise WireError(
                    f"CONNECT_NEXT of {size} bytes; it has a ticket and up to {MAX_ENDPOINT} of an endpoint"
                )
            if size > self._max_message:
                raise WireError(f"{command.name} of {size} bytes; at most {self._max_message} are accepted")
        end = _HEAD.size + size
        if len(held) < end:
            return None
        payload = bytes(memoryview(held)[_HEAD.size : end])
        del held[:end]
        if command is Command.HELLO:
            if self._greeted:
                raise WireError("a second HELLO")
            self._greeted = True
        self.bulk = bulk
        return _request(command, payload, bulk)


def _request(command: Command, payload: bytes, bulk: int) -> Request:
    if command in _PLAIN:
        form, kind = _PLAIN[command]
        plain: Request = kind(*form.unpack(payload))
        return plain
    if command in _ONE_TENSOR:
        form, kind = _ONE_TENSOR[command]
        one: Request = kind(WireTensor.unpack(payload), *form.unpack_from(payload, _T))
        return one
    if command is Command.SET_TENSOR:
        cache_flag, offset = struct.unpack_from("<BQ", payload, _T)
        return SetTensor(WireTensor.unpack(payload), cache_flag, offset, bulk)
    if command is Command.DELIVER:
        sequence, computed = _DELIVER.unpack(payload)
        return Deliver(sequence, computed, bulk)
    if command is Command.CONNECT_NEXT:
        return ConnectNext(payload[:TICKET_BYTES], payload[TICKET_BYTES:])
    if command is Command.COPY_TENSOR:
        return CopyTensor(WireTensor.unpack(payload), WireTensor.unpack(payload, _T))
    if command is Command.GET_ALLOC_SIZE:
        tensors = [WireTensor.unpack(payload, 4 + i * _T) for i in range(1 + MAX_SRC)]
        return GetAllocSize(_U32.unpack_from(payload)[0], tensors[0], tuple(tensors[1:]))
    return read_graph(payload)


# --- responses --------------------------------------------------------------------------------------------------------


class HelloResponse(NamedTuple):
    """`own` is LLAMADO or LLAMADO_LINKED where the worker is ours, 0 where it is ggml's."""

    major: int
    minor: int
    patch: int
    own: int = 0
    caps: bytes = bytes(CAPS_BYTES)

    @property
    def ours(self) -> bool:
        """Whether the worker is ours."""
        return self.own in (LLAMADO, LLAMADO_LINKED)


class Number(NamedTuple):
    """Of GET_ALIGNMENT, GET_MAX_SIZE, BUFFER_GET_BASE, GET_ALLOC_SIZE, DEVICE_COUNT, SET_TENSOR_HASH, COPY_TENSOR;
    of CONNECT_NEXT the link's (0: there is none), of ATTACH 1 or 0.
    """

    value: int


class Allocated(NamedTuple):
    """`ptr` names the buffer, 0 where there was no room."""

    ptr: int
    size: int


class DeviceMemory(NamedTuple):
    free: int
    total: int


class TensorData(NamedTuple):
    """Followed by `size` bytes of bulk."""

    size: int


class InletTicket(NamedTuple):
    """Where AWAIT finds what comes with the ticket."""

    number: int
    ticket: bytes


class Awaited(NamedTuple):
    """Whether the bytes came (1; 0: nothing comes by this inlet any more), and the microseconds that whoever sent them
    had computed for them.
    """

    came: int
    computed: int


Response = HelloResponse | Number | Allocated | DeviceMemory | TensorData | InletTicket | Awaited

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
    Command.CONNECT_NEXT: (_U32, Number),
    Command.ATTACH: (struct.Struct("<B"), Number),
    Command.AWAIT: (struct.Struct("<BQ"), Awaited),
}
"""The responses of a fixed size; GET_TENSOR's is the data that was asked for. Other commands have none."""


def has_response(command: Command) -> bool:
    """Whether a command is answered."""
    return command is Command.GET_TENSOR or command in RESPONSES


def write_response(command: Command, response: Response) -> bytes:
    """The bytes of a response to `command`; TensorData's are followed by the data, which the caller sends."""
    if isinstance(response, TensorData):
        return _SIZE.pack(response.size)
    form, _ = RESPONSES[command]
    return _SIZE.pack(form.size) + form.pack(*response)


class ResponseReader(_MessageBuffer):
    """The client's side: responses from bytes, in the order in which they were `expect`ed."""

    def __init__(self) -> None:
        super().__init__()
        self._expected: deque[tuple[Command, int]] = deque()

    def expect(self, command: Command, size: int = 0) -> None:
        """A request was sent whose response comes after those expected before; `size` of GET_TENSOR's data."""
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
        if command is Command.GET_TENSOR:
            if size != data:
                raise WireError(f"GET_TENSOR gave {size} bytes of {data}")
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
