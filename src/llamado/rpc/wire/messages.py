"""Message values: the requests and responses of the protocol, and the tensors in them.

A new request is a number in `Command`, a class here that is part of `Request`, and a row of the table in
`wire/table.py`. A worker serves it with one handler (`rpc/worker/handlers/`).
"""

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
LLAMADO = 0x4C
"""Marks our worker in a byte of the HELLO response that ggml leaves zero and never reads.

Such a worker allocates activations without a buffer itself and serves other connections while one computes. Feature
bits are added to the mark.
"""
LINKS, OWN_FILES, NUMERICS = 1, 2, 16
"""Feature bits: tensors sent to other workers of ours (OPEN_INLET to CLOSE_INLET), weights in the worker's own files
(OFFER, BIND), and the numerics of a device (GET_NUMERICS).
"""
TICKET_BYTES = 16
MAX_HOST = 64
"""Bytes of the host name in COMM_INIT, padded with zeros."""
SHA256_BYTES = 32
NUMERICS_BYTES = 128
"""Bytes of a device's numerics, padded with zeros."""
MAX_ENDPOINT = 320
"""Most bytes of an endpoint as text; a host name has at most 253."""
MAX_MESSAGE = 64 << 20
"""Most bytes of a request held in memory, without bulk data: a graph of 200,000 tensors."""


class WireError(LlamadoError):
    """Bytes that break the protocol. The connection cannot be used any further."""


class Command(IntEnum):
    """The first byte of a request. Numbers up to 22 are ggml's."""

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
    # Only for workers whose HELLO response has LLAMADO. Far from ggml's numbers, which keep growing.
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
"""Commands that only our clients send."""

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
"""One tensor on the wire, 296 bytes. `buffer` and `data` are numbers of the worker's, 0 without memory."""

_TENSOR = struct.Struct(f"<QIQ{MAX_DIMS}I{MAX_DIMS}II{OP_PARAMS_BYTES}si{MAX_SRC}QQQQ{MAX_NAME}si")
assert _TENSOR.size == TENSOR.itemsize == 296


class WireTensor(NamedTuple):
    """One tensor of a request, in the layout of `TENSOR`."""

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
        """Return the 296 bytes. A name that is too long is cut before its closing zero."""
        return _TENSOR.pack(
            self.id, self.type, self.buffer, *self.ne, *self.nb, self.op, self.op_params, self.flags, *self.src,
            self.view_src, self.view_offs, self.data, self.name[: MAX_NAME - 1], self.use_count,
        )  # fmt: skip

    @classmethod
    def unpack(cls, payload: bytes | memoryview, at: int = 0) -> WireTensor:
        """Return the tensor at byte `at`."""
        v = _TENSOR.unpack_from(payload, at)
        name = v[27].split(b"\0", 1)[0]
        return cls(
            v[0], v[1], v[2], v[3:7], v[7:11], v[26], v[11], v[12], v[13], v[14:24], v[24], v[25], name, v[28]
        )  # fmt: skip

    @property
    def label(self) -> str:
        """The name as text for errors and logs, "?" without one."""
        return self.name.decode("utf-8", "replace") or "?"

    def summary(self) -> str:
        """Return name, type, shape and place in one line."""
        return f"{self.label} (type {self.type}, {list(self.ne)}, buffer {self.buffer}, data {self.data:#x})"


# --- requests ---


class Hello(NamedTuple):
    """Open the protocol. The first request of every connection."""

    caps: bytes = bytes(CAPS_BYTES)


class Upgrade(NamedTuple):
    """Set the protocol's major version from the next request on. Only directly after HELLO. No response."""

    major: int


class DeviceCount(NamedTuple):
    """Ask for the number of devices."""


class AllocBuffer(NamedTuple):
    """Allocate a buffer of `size` bytes."""

    device: int
    size: int


class GetAlignment(NamedTuple):
    """Ask for the alignment of tensors in a buffer, in bytes."""

    device: int


class GetMaxSize(NamedTuple):
    """Ask for the size of the largest buffer, in bytes."""

    device: int


class GetDeviceMemory(NamedTuple):
    """Ask for the free and total memory of a device, in bytes."""

    device: int


class GraphRecompute(NamedTuple):
    """Run a graph again: the one sent with this `uid`, in 7.0 the device's last one. No response."""

    device: int
    uid: int = 0


class BufferGetBase(NamedTuple):
    """Ask for the address of a buffer's first byte."""

    ptr: int


class FreeBuffer(NamedTuple):
    """Free a buffer. No response."""

    ptr: int


class BufferClear(NamedTuple):
    """Set every byte of a buffer to `value`. No response."""

    ptr: int
    value: int


class SetTensor(NamedTuple):
    """Write the `size` bytes of bulk behind this request to byte `offset` of the tensor. No response.

    With a nonzero `cache_flag` the worker may keep a copy on disk under the hash of the data.
    """

    tensor: WireTensor
    cache_flag: int
    offset: int
    size: int


class SetTensorHash(NamedTuple):
    """Write cached bytes with FNV-1a `hash` to byte `offset` of the tensor, if the worker has them."""

    tensor: WireTensor
    offset: int
    hash: int


class GetTensor(NamedTuple):
    """Read `size` bytes from byte `offset` of the tensor."""

    tensor: WireTensor
    offset: int
    size: int


class SetTensor2D(NamedTuple):
    """Write `rows` rows of `row` bytes each, `stride` bytes apart, from byte `offset` of the tensor on. No response.

    The rows follow as bulk, without gaps.
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
    """Read rows of a tensor as `SetTensor2D` writes them. The response has no gaps."""

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
    """Make a device number `rank` of the `world` devices that sum tensors.

    Rank 0 listens on `port`, the others connect to `host`.
    """

    device: int
    rank: int
    world: int
    port: int
    host: bytes


class CommAllReduce(NamedTuple):
    """Add the other rank's values of a tensor to this one's. No response."""

    device: int
    tensor: WireTensor


class CommFree(NamedTuple):
    """Close the connection that COMM_INIT opened. No response."""

    device: int


class CopyTensor(NamedTuple):
    """Copy the bytes of `src` to `dst`."""

    src: WireTensor
    dst: WireTensor


class InitTensor(NamedTuple):
    """Prepare a tensor's memory, as some back ends of ggml need. No response."""

    tensor: WireTensor


class MemsetTensor(NamedTuple):
    """Set `size` bytes from byte `offset` of the tensor to `value`. No response."""

    tensor: WireTensor
    offset: int
    size: int
    value: int


class GetAllocSize(NamedTuple):
    """Ask for the bytes that a device needs for a tensor with these sources."""

    device: int
    tensor: WireTensor
    srcs: tuple[WireTensor, ...]


class OpenInlet(NamedTuple):
    """Ask for a ticket with which another worker may send tensors to this client's memory."""


class ConnectNext(NamedTuple):
    """Make the worker connect to the one at `endpoint` and send `Attach` there. The response is 0 if it cannot."""

    ticket: bytes
    endpoint: bytes


class Attach(NamedTuple):
    """Reserve this connection for `Deliver` requests to the client that holds the ticket."""

    ticket: bytes


class Push(NamedTuple):
    """Send the first `size` bytes of a tensor over a link, after all earlier requests. No response."""

    tensor: WireTensor
    link: int
    size: int
    sequence: int


class Await(NamedTuple):
    """Wait for the `Deliver` with this `sequence` on an inlet and write its `size` bytes to the tensor's start."""

    tensor: WireTensor
    inlet: int
    size: int
    sequence: int


class Deliver(NamedTuple):
    """Carry `size` bytes of bulk over a link. No response; `sequence` ascends.

    `computed`: see `AwaitResponse`.
    """

    sequence: int
    computed: int
    size: int


class CloseInlet(NamedTuple):
    """Close an inlet, on any connection. Senders and waiting `Await` requests return at once. No response."""

    ticket: bytes


class OfferedWeight(NamedTuple):
    """A weight's name and size in bytes. The name only helps to find it; the hash decides."""

    name: bytes
    size: int


class Offer(NamedTuple):
    """Ask which weights the worker's own files may hold. The worker starts to hash those.

    The response has a byte per weight: 0 for none of that name and size, 1 for one to copy, 2 for one to map.
    """

    weights: tuple[OfferedWeight, ...]

    @property
    def size(self) -> int:
        """Bytes of the response."""
        return len(self.weights)


class BoundWeight(NamedTuple):
    """The `size` bytes at address `data` of a buffer that are to be the weight with this SHA-256."""

    buffer: int
    data: int
    size: int
    sha256: bytes
    name: bytes


class Bind(NamedTuple):
    """Write weights from the worker's own files to buffers. The response has a byte per weight, 1 if it is there."""

    weights: tuple[BoundWeight, ...]

    @property
    def size(self) -> int:
        """Bytes of the response."""
        return len(self.weights)


class GetNumerics(NamedTuple):
    """Ask for a device's numerics: what the bits of its results depend on."""

    device: int


@dataclass(frozen=True, eq=False)
class GraphCompute:
    """Compute a graph. No response.

    `nodes` are the tensor ids u64[n_nodes] to compute in order, `tensors` TENSOR[n_tensors] all tensors they need.
    `payload` is device, nodes and tensors as in protocol 7.0; the arrays are views of it, and equal payloads are equal
    graphs. `uid` is the client's name for the graph, 0 for none.
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

# --- responses ---


class HelloResponse(NamedTuple):
    """The worker's protocol version. `features` is LLAMADO and feature bits for our worker, 0 for ggml's."""

    major: int
    minor: int
    patch: int
    features: int = 0
    caps: bytes = bytes(CAPS_BYTES)

    @property
    def is_ours(self) -> bool:
        """True for a worker of llamado."""
        return self.features & ~(LINKS | OWN_FILES | NUMERICS) == LLAMADO

    @property
    def has_links(self) -> bool:
        """True if the worker sends tensors to other workers of ours."""
        return self.is_ours and bool(self.features & LINKS)

    @property
    def has_own_files(self) -> bool:
        """True if the worker may have weights in its own files."""
        return self.is_ours and bool(self.features & OWN_FILES)

    @property
    def has_numerics(self) -> bool:
        """True if the worker responds to GET_NUMERICS."""
        return self.is_ours and bool(self.features & NUMERICS)


class Number(NamedTuple):
    """A response of one number: a size, a count, a link (0: none), or 1 for done and 0 for not done."""

    value: int


class AllocResponse(NamedTuple):
    """The name and size of a new buffer. `ptr` is 0 if there is no room."""

    ptr: int
    size: int


class DeviceMemory(NamedTuple):
    """Bytes of a device."""

    free: int
    total: int


class TensorData(NamedTuple):
    """Header of `size` bytes of bulk: the response to GET_TENSOR, GET_TENSOR_2D, OFFER and BIND."""

    size: int


class InletTicket(NamedTuple):
    """A new inlet: its number for `Await`, and the ticket for the worker that sends to it."""

    number: int
    ticket: bytes


class AwaitResponse(NamedTuple):
    """`came` is 1 if the bytes are there, 0 if the inlet is closed.

    `computed`: microseconds that the sending worker computed for them.
    """

    came: int
    computed: int


class Numerics(NamedTuple):
    """A device's numerics. Devices with equal, nonempty `words` compute equal bits."""

    words: bytes


Response = (
    HelloResponse | Number | AllocResponse | DeviceMemory | TensorData | InletTicket | AwaitResponse | Numerics
)  # fmt: skip
