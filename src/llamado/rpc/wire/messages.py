"""The messages of the wire as values: requests, responses, and what both are made of."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.errors import LlamadoError
from llamado.ggml.ops import MAX_DIMS, MAX_NAME, MAX_SRC, OP_PARAMS_BYTES

CAPS_BYTES = 24
"""Transport capabilities in HELLO; all zero is plain TCP."""
HASH_THRESHOLD = 10 << 20
"""Weights larger than this are asked for by hash before they are sent."""
LLAMADO = 0x4C
"""What our worker puts in the byte of HELLO's response that ggml leaves zero and never reads: it places activations
without a buffer by itself, and answers other connections while one computes. What else it can is added to that.
"""
LINKED, OWN_FILES, TELLS_NUMERICS = 1, 2, 16
"""It passes tensors to other workers of ours (OPEN_INLET to CLOSE_INLET); it may have weights in files of its own
(OFFER, BIND); it says what it computes with (GET_NUMERICS).
"""
TICKET_BYTES = 16
MAX_HOST = 64
"""Bytes of a host's name in COMM_INIT, zeros behind it."""
SHA256_BYTES = 32
NUMERICS_BYTES = 128
"""Of what a device computes with, zeros behind it."""
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
    SET_TENSOR_2D = 18
    GET_TENSOR_2D = 19
    COMM_INIT = 20
    COMM_ALLREDUCE = 21
    COMM_FREE = 22
    # Ours, where HELLO's response has said so; far from ggml's, which go on counting.
    OPEN_INLET = 0x40
    CONNECT_NEXT = 0x41
    ATTACH = 0x42
    PUSH = 0x43
    AWAIT = 0x44
    DELIVER = 0x45
    CLOSE_INLET = 0x46
    OFFER = 0x47
    BIND = 0x48
    GET_NUMERICS = 0x49
    UPGRADE = 0x4A


OWN_COMMANDS = frozenset(command for command in Command if command >= 0x40)
"""The commands that only our clients send."""


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


# --- requests ---


class Hello(NamedTuple):
    """Must be the first request of a connection."""

    caps: bytes = bytes(CAPS_BYTES)


class Upgrade(NamedTuple):
    """The protocol's major version from the next request on; only directly behind HELLO. No response."""

    major: int


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
    """Runs a graph again that was sent with this uid; in 7.0, which has none, the device's last one. No response."""

    device: int
    uid: int = 0


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


class SetTensor2D(NamedTuple):
    """Followed by `rows` · `row` bytes of bulk: pieces of `row` bytes, to be `stride` bytes apart in the tensor from
    byte `offset` on. No response.
    """

    tensor: WireTensor
    offset: int
    row: int
    rows: int
    stride: int

    @property
    def size(self) -> int:
        """Bytes of data."""
        return self.row * self.rows


class GetTensor2D(NamedTuple):
    """Asks for pieces of a tensor as SetTensor2D sets them; they come without gaps."""

    tensor: WireTensor
    offset: int
    row: int
    rows: int
    stride: int

    @property
    def size(self) -> int:
        """Bytes of data."""
        return self.row * self.rows


class CommInit(NamedTuple):
    """Makes a device the one of number `rank` of `world` that add up tensors: rank 0 waits at `port`, the others
    connect to `host`.
    """

    device: int
    rank: int
    world: int
    port: int
    host: bytes


class CommAllReduce(NamedTuple):
    """Adds to a tensor what the other rank has of it. No response."""

    device: int
    tensor: WireTensor


class CommFree(NamedTuple):
    """Ends what COMM_INIT began. No response."""

    device: int


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


class Offered(NamedTuple):
    """A weight by its `name` and bytes; what it is called finds it, and is never believed."""

    name: bytes
    size: int


class Offer(NamedTuple):
    """Asks which weights may be in files of the worker's, which begins to hash those. The answer is a byte each: 1
    where it has one of that name and size.
    """

    weights: tuple[Offered, ...]

    @property
    def size(self) -> int:
        """Bytes of the answer."""
        return len(self.weights)


class Bound(NamedTuple):
    """Bytes that are to be those with a SHA-256: `size` of them at address `data` of a buffer."""

    buffer: int
    data: int
    size: int
    sha256: bytes
    name: bytes


class Bind(NamedTuple):
    """Puts weights from the worker's own files where they are wanted. The answer is a byte each: 1 where it is done."""

    weights: tuple[Bound, ...]

    @property
    def size(self) -> int:
        """Bytes of the answer."""
        return len(self.weights)


class GetNumerics(NamedTuple):
    """Asks what the bits of a device's results depend on."""

    device: int


@dataclass(frozen=True, eq=False)
class GraphCompute:
    """A graph: `nodes` are the ids u64[n_nodes] in order, `tensors` TENSOR[n_tensors] all they need. No response.

    `payload` is device, nodes and tensors as protocol 7.0 has them, of which the arrays are views: equal payloads are
    equal graphs. `uid` is the client's name for the graph, 0 where it has none.
    """

    device: int
    nodes: NDArray[np.uint64]
    tensors: NDArray[Any]
    payload: bytes
    uid: int = 0


Request = (
    Hello | DeviceCount | AllocBuffer | GetAlignment | GetMaxSize | GetDeviceMemory | GraphRecompute | BufferGetBase
    | FreeBuffer | BufferClear | SetTensor | SetTensorHash | GetTensor | CopyTensor | InitTensor | MemsetTensor
    | GetAllocSize | GraphCompute | SetTensor2D | GetTensor2D | CommInit | CommAllReduce | CommFree
    | OpenInlet | ConnectNext | Attach | Push | Await | Deliver | CloseInlet | Offer | Bind
    | GetNumerics | Upgrade
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
    SetTensor2D: Command.SET_TENSOR_2D,
    GetTensor2D: Command.GET_TENSOR_2D,
    CommInit: Command.COMM_INIT,
    CommAllReduce: Command.COMM_ALLREDUCE,
    CommFree: Command.COMM_FREE,
    OpenInlet: Command.OPEN_INLET,
    ConnectNext: Command.CONNECT_NEXT,
    Attach: Command.ATTACH,
    Push: Command.PUSH,
    Await: Command.AWAIT,
    Deliver: Command.DELIVER,
    CloseInlet: Command.CLOSE_INLET,
    Offer: Command.OFFER,
    Bind: Command.BIND,
    GetNumerics: Command.GET_NUMERICS,
    Upgrade: Command.UPGRADE,
}

# --- responses ---


class HelloResponse(NamedTuple):
    """`own` is LLAMADO and what it can where the worker is ours, 0 where it is ggml's."""

    major: int
    minor: int
    patch: int
    own: int = 0
    caps: bytes = bytes(CAPS_BYTES)

    @property
    def ours(self) -> bool:
        """Whether the worker is ours."""
        return self.own & ~(LINKED | OWN_FILES | TELLS_NUMERICS) == LLAMADO

    @property
    def linked(self) -> bool:
        """Whether it passes tensors to others of ours."""
        return self.ours and bool(self.own & LINKED)

    @property
    def own_files(self) -> bool:
        """Whether it may have weights in files of its own."""
        return self.ours and bool(self.own & OWN_FILES)

    @property
    def tells_numerics(self) -> bool:
        """Whether it says what it computes with."""
        return self.ours and bool(self.own & TELLS_NUMERICS)


class Number(NamedTuple):
    """Of GET_ALIGNMENT, GET_MAX_SIZE, BUFFER_GET_BASE, GET_ALLOC_SIZE, DEVICE_COUNT, SET_TENSOR_HASH, COPY_TENSOR,
    COMM_INIT (1: done);
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
    """Followed by `size` bytes of bulk. Of GET_TENSOR and GET_TENSOR_2D; OFFER's and BIND's answers come so, too."""

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


class Numerics(NamedTuple):
    """Two devices of which the `words` are the same compute the same bits; none where nobody knows."""

    words: bytes


Response = HelloResponse | Number | Allocated | DeviceMemory | TensorData | InletTicket | Awaited | Numerics
