"""Requests as bytes, and bytes as requests."""

from __future__ import annotations

import struct
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.ops import MAX_NAME, MAX_SRC
from llamado.rpc.wire.buffer import MessageBuffer
from llamado.rpc.wire.messages import (
    CAPS_BYTES,
    COMMANDS,
    MAX_ENDPOINT,
    MAX_HOST,
    MAX_MESSAGE,
    SHA256_BYTES,
    TENSOR,
    TICKET_BYTES,
    AllocBuffer,
    Attach,
    Await,
    Bind,
    Bound,
    BufferClear,
    BufferGetBase,
    CloseInlet,
    CommAllReduce,
    Command,
    CommFree,
    CommInit,
    ConnectNext,
    CopyTensor,
    Deliver,
    DeviceCount,
    FreeBuffer,
    GetAlignment,
    GetAllocSize,
    GetDeviceMemory,
    GetMaxSize,
    GetNumerics,
    GetTensor,
    GetTensor2D,
    GraphCompute,
    GraphRecompute,
    Hello,
    InitTensor,
    MemsetTensor,
    Offer,
    Offered,
    OpenInlet,
    Push,
    Request,
    SetTensor,
    SetTensor2D,
    SetTensorHash,
    Upgrade,
    WireError,
    WireTensor,
)
from llamado.rpc.wire.protocols import LATEST, PROTOCOLS, SPOKEN, Protocol

_HEAD = struct.Struct("<BQ")
_SIZE = struct.Struct("<Q")
_U32 = struct.Struct("<I")
_GRAPH = struct.Struct("<II")
_T = TENSOR.itemsize
_SET = _T + 9  # the tensor, the flag and the offset in front of SET_TENSOR's data
_PIECES = struct.Struct("<QQQQ")
_DELIVER = struct.Struct("<QQ")
_OFFERED = struct.Struct(f"<{MAX_NAME}sQ")
_BOUND = struct.Struct(f"<QQQ{SHA256_BYTES}s{MAX_NAME}s")

# Payloads that are a few numbers.
_PLAIN: dict[Command, tuple[struct.Struct, type]] = {
    Command.HELLO: (struct.Struct(f"<{CAPS_BYTES}s"), Hello),
    Command.DEVICE_COUNT: (struct.Struct("<"), DeviceCount),
    Command.ALLOC_BUFFER: (struct.Struct("<IQ"), AllocBuffer),
    Command.GET_ALIGNMENT: (_U32, GetAlignment),
    Command.GET_MAX_SIZE: (_U32, GetMaxSize),
    Command.GET_DEVICE_MEMORY: (_U32, GetDeviceMemory),
    Command.BUFFER_GET_BASE: (_SIZE, BufferGetBase),
    Command.FREE_BUFFER: (_SIZE, FreeBuffer),
    Command.BUFFER_CLEAR: (struct.Struct("<QB"), BufferClear),
    Command.COMM_FREE: (_U32, CommFree),
    Command.GET_NUMERICS: (_U32, GetNumerics),
    Command.UPGRADE: (_U32, Upgrade),
    Command.OPEN_INLET: (struct.Struct("<"), OpenInlet),
    Command.ATTACH: (struct.Struct(f"<{TICKET_BYTES}s"), Attach),
    Command.CLOSE_INLET: (struct.Struct(f"<{TICKET_BYTES}s"), CloseInlet),
}
# Payloads that are one tensor and a few numbers.
_ONE_TENSOR: dict[Command, tuple[struct.Struct, type]] = {
    Command.SET_TENSOR_HASH: (struct.Struct("<QQ"), SetTensorHash),
    Command.GET_TENSOR: (struct.Struct("<QQ"), GetTensor),
    Command.GET_TENSOR_2D: (_PIECES, GetTensor2D),
    Command.INIT_TENSOR: (struct.Struct("<"), InitTensor),
    Command.MEMSET_TENSOR: (struct.Struct("<QQB"), MemsetTensor),
    Command.PUSH: (struct.Struct("<IQQ"), Push),
    Command.AWAIT: (struct.Struct("<IQQ"), Await),
}
_ALLOC_SIZE = 4 + (1 + MAX_SRC) * _T
_COMM_INIT = struct.Struct(f"<IIII{MAX_HOST}s")

# What stands before the data of commands that have some.
_BEFORE_BULK = {
    Command.SET_TENSOR: _SET,
    Command.SET_TENSOR_2D: _T + _PIECES.size,
    Command.DELIVER: _DELIVER.size,
}
# Payloads that are a list.
_LISTS = {Command.OFFER: _OFFERED.size, Command.BIND: _BOUND.size}

_SIZES: dict[Command, int] = (
    {command: form.size for command, (form, _) in _PLAIN.items()}
    | {command: _T + form.size for command, (form, _) in _ONE_TENSOR.items()}
    | {
        Command.COPY_TENSOR: 2 * _T,
        Command.GET_ALLOC_SIZE: _ALLOC_SIZE,
        Command.COMM_INIT: _COMM_INIT.size,
        Command.COMM_ALLREDUCE: _U32.size + _T,
    }
)


@cache
def _recompute(protocol: Protocol) -> struct.Struct:
    return struct.Struct("<IQ" if protocol.names_graphs else "<I")


def write_request(request: Request, protocol: Protocol = LATEST) -> bytes:
    """The bytes of a request; where data follows (`size` bytes of it), the caller sends that.

    Only GRAPH_COMPUTE and GRAPH_RECOMPUTE are not the same in every version.

    >>> write_request(GetAlignment(0)).hex()
    '01040000000000000000000000'
    """
    command = COMMANDS[type(request)]
    if isinstance(request, SetTensor):
        head = _HEAD.pack(command, _SET + request.size)
        return head + request.tensor.pack() + struct.pack("<BQ", request.cache_flag, request.offset)
    if isinstance(request, SetTensor2D):
        head = _HEAD.pack(command, _T + _PIECES.size + request.size)
        return head + request.tensor.pack() + _PIECES.pack(*request[1:])
    if isinstance(request, Deliver):
        head = _HEAD.pack(command, _DELIVER.size + request.size)
        return head + _DELIVER.pack(request.sequence, request.computed)
    if isinstance(request, GraphCompute):
        return b"".join(graph_pieces(request.payload, request.uid, protocol))
    payload: bytes
    if isinstance(request, GraphRecompute):
        form = _recompute(protocol)
        payload = form.pack(*request) if protocol.names_graphs else form.pack(request.device)
    elif isinstance(request, ConnectNext):
        payload = request.ticket + request.endpoint
    elif isinstance(request, CopyTensor):
        payload = request.src.pack() + request.dst.pack()
    elif isinstance(request, GetAllocSize):
        srcs = b"".join(t.pack() for t in request.srcs)
        payload = _U32.pack(request.device) + request.tensor.pack() + srcs.ljust(MAX_SRC * _T, b"\0")
    elif isinstance(request, CommInit):
        payload = _COMM_INIT.pack(*request)
    elif isinstance(request, CommAllReduce):
        payload = _U32.pack(request.device) + request.tensor.pack()
    elif isinstance(request, Offer):
        payload = b"".join(_OFFERED.pack(*one) for one in request.weights)
    elif isinstance(request, Bind):
        payload = b"".join(_BOUND.pack(*one) for one in request.weights)
    elif command in _PLAIN:
        payload = _PLAIN[command][0].pack(*request)
    else:
        assert isinstance(request, SetTensorHash | GetTensor | GetTensor2D | InitTensor | MemsetTensor | Push | Await)
        payload = request.tensor.pack() + _ONE_TENSOR[command][0].pack(*request[1:])
    return _HEAD.pack(command, len(payload)) + payload


def graph_pieces(payload: bytes, uid: int, protocol: Protocol) -> tuple[bytes | memoryview, ...]:
    """The bytes of GRAPH_COMPUTE, in pieces that are sent one behind the other; `payload` as GraphCompute has it."""
    if not protocol.names_graphs:
        return _HEAD.pack(Command.GRAPH_COMPUTE, len(payload)), payload
    head = _HEAD.pack(Command.GRAPH_COMPUTE, len(payload) + _SIZE.size)
    return head + payload[: _U32.size] + _SIZE.pack(uid), memoryview(payload)[_U32.size :]


def graph_request(device: int, nodes: NDArray[np.uint64], tensors: NDArray[Any], uid: int = 0) -> GraphCompute:
    """A GRAPH_COMPUTE of ids u64[n_nodes] and TENSOR[n_tensors]."""
    payload = b"".join(
        (_GRAPH.pack(device, len(nodes)), nodes.astype("<u8").tobytes(), _U32.pack(len(tensors)), tensors.tobytes())
    )
    return read_graph(payload, uid)


def read_graph(payload: bytes, uid: int = 0) -> GraphCompute:
    """A graph from what GraphCompute calls its payload, without a copy. Raises WireError for counts that do not fit its
    size.
    """
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
    return GraphCompute(device, nodes, tensors, payload, uid)


class RequestReader(MessageBuffer):
    """The worker's side: requests from bytes. `max_message` bounds what is held in memory for one.

    `protocol` is what is spoken; it may be set until the request after HELLO comes, and UPGRADE sets it, too.
    """

    def __init__(self, max_message: int = MAX_MESSAGE, protocol: Protocol = LATEST) -> None:
        super().__init__()
        self.protocol = protocol
        self._max_message = max_message
        self._greeted = self._follows_hello = False

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
        if command not in self.protocol.commands:
            raise WireError(f"{command.name} is no command of RPC {self.protocol}, which the two sides agreed on")
        if len(held) < _HEAD.size:
            return None
        size = _HEAD.unpack_from(held)[1]
        expected = _recompute(self.protocol).size if command is Command.GRAPH_RECOMPUTE else _SIZES.get(command)
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
            if command in _LISTS and (not size or size % _LISTS[command]):
                raise WireError(f"{command.name} of {size} bytes; each of its entries has {_LISTS[command]}")
            if size > self._max_message:
                raise WireError(f"{command.name} of {size} bytes; at most {self._max_message} are accepted")
        end = _HEAD.size + size
        if len(held) < end:
            return None
        payload = bytes(memoryview(held)[_HEAD.size : end])
        del held[:end]
        if command is Command.HELLO and self._greeted:
            raise WireError("a second HELLO")
        self.bulk = bulk
        request = _request(command, payload, bulk, self.protocol)
        if isinstance(request, Upgrade):
            if not self._follows_hello or request.major not in PROTOCOLS:
                raise WireError(f"UPGRADE to RPC {request.major}; this program speaks {SPOKEN}, from HELLO on")
            self.protocol = PROTOCOLS[request.major]
        self._follows_hello = command is Command.HELLO
        self._greeted = True
        return request


def _request(command: Command, payload: bytes, bulk: int, protocol: Protocol) -> Request:
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
    if command is Command.SET_TENSOR_2D:
        pieces = SetTensor2D(WireTensor.unpack(payload), *_PIECES.unpack_from(payload, _T))
        if not bulk or pieces.size != bulk:
            raise WireError(f"SET_TENSOR_2D of {pieces.rows} · {pieces.row} bytes came with {bulk}")
        return pieces
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
    if command is Command.GRAPH_RECOMPUTE:
        return GraphRecompute(*_recompute(protocol).unpack(payload))
    if command is Command.COMM_INIT:
        device, rank, world, port, host = _COMM_INIT.unpack(payload)
        return CommInit(device, rank, world, port, _name(host))
    if command is Command.COMM_ALLREDUCE:
        return CommAllReduce(_U32.unpack_from(payload)[0], WireTensor.unpack(payload, _U32.size))
    if command is Command.OFFER:
        return Offer(tuple(Offered(_name(name), size) for name, size in _OFFERED.iter_unpack(payload)))
    if command is Command.BIND:
        return Bind(tuple(Bound(b, at, n, sha, _name(name)) for b, at, n, sha, name in _BOUND.iter_unpack(payload)))
    uid = 0
    if protocol.names_graphs:
        if len(payload) < _U32.size + _SIZE.size:
            raise WireError(f"GRAPH_COMPUTE of {len(payload)} bytes is too short")
        uid = _SIZE.unpack_from(payload, _U32.size)[0]
        payload = payload[: _U32.size] + payload[_U32.size + _SIZE.size :]
    return read_graph(payload, uid)


def _name(field: bytes) -> bytes:
    return field.split(b"\0", 1)[0]
