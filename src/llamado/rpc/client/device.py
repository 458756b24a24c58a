"""A remote device: the Device contract over a connection to a worker, ours or ggml's."""

from __future__ import annotations

import itertools
import ssl
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import (
    Buffer,
    Bytes,
    Device,
    DeviceError,
    DeviceFull,
    DeviceLost,
    KernelQuota,
    LoadProgress,
    OperationTime,
    WorkerLost,
)
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op, TensorFlag
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.rpc import wire
from llamado.rpc.client.allocator import activations, plan
from llamado.rpc.client.connection import ALIVE_TIMEOUT, REPLY_TIMEOUT, WorkerConnection
from llamado.rpc.client.encode import wire_graph, wire_tensor
from llamado.rpc.client.link import End, RemoteLink
from llamado.rpc.client.own_weights import OwnWeights
from llamado.rpc.client.sent_graphs import SentGraphs
from llamado.rpc.client.sent_inputs import SentInputs
from llamado.rpc.client.upload import HASH_THRESHOLD, OWN_HASH_THRESHOLD, Weight, send_weights
from llamado.rpc.endpoint import Endpoint, client_tls
from llamado.rpc.known_hashes import KnownHashes
from llamado.rpc.transport import ConnectError

_SMALL = 32 << 10
"""Bytes of the largest write that is held for the next request."""
_PAGE = 4096
"""Page size. Large weights start at whole pages on our workers, which can map a cached file there."""
_ASK_FIRST = 16 << 20
"""Bytes from which an allocation checks the free memory first: a worker may promise memory it does not have."""
_PAYLOADS_KEPT = 64 << 20
_MOST_STEPS = 8
"""Most pieces of an overlapping copy; beyond that it goes through other memory."""
_COPY_STEP = 1 << 30
_INPUT = int(TensorFlag.INPUT)
_MOST_DEVICES = 64
_MOST_ALIGNMENT = 1 << 20
_ADDRESSES = 1 << 64
_MOST_BYTES = 1 << 62
"""Bytes to which a worker's memory is capped: sums of a few stay within the 64 bits of the wire."""

# Operations whose results may need more memory than their bytes on some back ends; as in ggml's client.
_MAY_EXPAND = frozenset({Op.FLASH_ATTN_EXT, Op.MUL_MAT, Op.MUL_MAT_ID, Op.CUMSUM, Op.ARGSORT, Op.TOP_K})


class RemoteBuffer:
    """A buffer on a worker: `ptr` is its name there, `base` its address."""

    memory: Bytes | None = None

    def __init__(self, device: RemoteDevice, ptr: int, base: int, size: int) -> None:
        self.device, self.ptr, self.base, self.size = device, ptr, base, size
        self.sent_inputs = SentInputs()
        self.local_weight_bytes = 0
        """Bytes that the worker filled from its own files."""

    def lock(self) -> bool:
        """Return True: there is no memory here to lock."""
        return True

    def free(self) -> None:
        """Free the buffer; nothing to do for a lost worker."""
        if self.ptr:
            self.device._free(self)


class _PreparedGraph(NamedTuple):
    """A graph, its payload on the wire and its name there."""

    graph: Graph
    payload: bytes
    uid: int


@dataclass
class _WorkerState:
    """State that the devices of one worker share."""

    connection: WorkerConnection
    open: int = 0
    freed: int = 0
    """Number of freed buffers. With each the worker drops its graphs."""


def connect(
    endpoint: Endpoint | str,
    *,
    first_number: int = 0,
    timeout: float = 5.0,
    greeting: float | None = None,
    tls: ssl.SSLContext | None = None,
    reply_timeout: float = REPLY_TIMEOUT,
    alive_timeout: float = ALIVE_TIMEOUT,
    hashes: MutableMapping[str, int] | None = None,
    digests: MutableMapping[str, int] | None = None,
    links: bool = True,
) -> list[RemoteDevice]:
    """Connect to a worker and return its devices, numbered from `first_number`. They share one connection.

    `timeout`: seconds to connect; `greeting`: seconds for the greeting and for each property of a device (default:
    `timeout`). `tls`: context of a `tls://` endpoint (default: the system's authorities). `alive_timeout`: seconds
    without a sign of life after which the worker is lost. `hashes` and `digests`: FNV-1a and SHA-256 of weights by
    name, see KnownHashes. `links`: allow links to other workers. Raises ConnectError or VersionMismatch.
    """
    if isinstance(endpoint, str):
        endpoint = Endpoint.parse(endpoint)
    if not endpoint.tls:
        tls = None
    elif tls is None:
        tls = client_tls()
    connection = WorkerConnection(
        endpoint,
        tls=tls,
        timeout=timeout,
        greeting=greeting,
        reply_timeout=reply_timeout,
        alive_timeout=alive_timeout,
    )
    try:
        shared = _WorkerState(connection)
        patience = timeout if greeting is None else greeting
        try:
            count = connection.call(wire.DeviceCount(), wire.Number, patience).value
            if count > _MOST_DEVICES:
                raise DeviceError(f"{endpoint} reports {count:,} devices; at most {_MOST_DEVICES} are accepted")
            names = [f"RPC{first_number + i}[{endpoint}]" for i in range(count)]
            devices = [RemoteDevice(shared, i, name, patience) for i, name in enumerate(names)]
        except TimeoutError:
            message = f"{endpoint} greets, and does not say within {patience:g} s which devices it has: is it stopped?"
            raise ConnectError(message) from None
        for device in devices:
            device.hashes = {} if hashes is None else hashes
            device.worker_files.digests = {} if digests is None else digests
            device.links = links and connection.has_links
        if not devices:
            raise DeviceError(f"{endpoint} has no devices")
        return devices
    except BaseException:
        connection.close()
        raise


class RemoteDevice:
    """One device of a worker, safe to use from any thread. Requests run in the order of the calls.

    All calls raise DeviceLost once the worker is gone. `is_ours`: the worker is ours, not ggml's.
    """

    def __init__(self, shared: _WorkerState, number: int, name: str, patience: float) -> None:
        """Raises TimeoutError if a response takes more than `patience` seconds."""
        self._shared, self._number = shared, number
        self._connection = connection = shared.connection
        self.name = name
        self.endpoint, self.is_ours = connection.endpoint, connection.is_ours
        with connection.batch():
            alignment, max_size = (
                connection.start_call(wire.GetAlignment(number)),
                connection.start_call(wire.GetMaxSize(number)),
            )
            numerics = connection.start_call(wire.GetNumerics(number)) if connection.has_numerics else None
        self.links = False
        self.hashes: MutableMapping[str, int] = {}
        """FNV-1a of weights by name; computed ones are added."""
        self.worker_files = OwnWeights(connection, {})
        """Weights in the worker's own files."""
        self._alignment = max(1, connection.wait_for(alignment, wire.Number, patience).value)
        if self._alignment > _MOST_ALIGNMENT:
            raise DeviceError(f"{name} requires an alignment of {self._alignment} bytes; is it a worker?")
        self._max_size = min(connection.wait_for(max_size, wire.Number, patience).value or _MOST_BYTES, _MOST_BYTES)
        self.numerics: str | None = None
        """Kernels and compiler that the bits of results depend on; None for ggml's workers, which do not report it."""
        if numerics is not None:
            words = connection.wait_for(numerics, wire.Numerics, patience).words
            self.numerics = words.rstrip(b"\0").decode("utf-8", "replace") or None
        self._buffers: set[RemoteBuffer] = set()
        self._compute: RemoteBuffer | None = None
        self._prepared: OrderedDict[int, _PreparedGraph] = OrderedDict()
        self._prepared_bytes = 0
        self._sent = SentGraphs(connection.protocol)
        self._uids = itertools.count(1)
        self._sizes: dict[tuple[Any, ...], int] = {}
        self._failure: DeviceError | None = None
        self._copies: bool | None = True if self.is_ours else None
        self._closed = False
        self.reserve: Callable[[int], None] = lambda size: None
        shared.open += 1

    local = False
    details = ""
    working_bytes = 0

    def __repr__(self) -> str:
        return f"<RemoteDevice {self.name}{' lost' if self.lost else ''}>"

    # --- the worker ---------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """ "RPC0[host:port]". Numbering over several workers changes it."""
        return self._name

    @name.setter
    def name(self, name: str) -> None:
        self._name = name
        if not self._number:  # errors of the connection name the first device
            self._connection.name = name

    @property
    def lost(self) -> DeviceLost | None:
        """The worker's loss, None while it is up."""
        lost = self._connection.lost
        return None if lost is None else WorkerLost(self.name, lost.why)

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        """Call `callback` once when the worker is lost: from any thread, or now if it is lost. It must not block."""
        self._connection.on_lost(lambda why: callback(WorkerLost(self.name, why)))

    @property
    def heartbeat_seconds(self) -> float | None:
        """Round trip of the worker's latest heartbeat in seconds; None for ggml's, which have none."""
        return self._connection.round_trip

    utilization: float | None = None

    @property
    def zeroes_memory(self) -> bool:
        """True for ggml's workers, which clear memory byte by byte."""
        return not self.is_ours

    def supports(self, op: Op, type: TensorType) -> bool:
        """Return True: a worker rejects an unsupported operation when it gets the graph."""
        return True

    def round_trip(self) -> float:
        """Return the shortest of five round trips in seconds, once the worker is idle."""
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            self._connection.call(wire.DeviceCount(), wire.Number)
            best = min(best, time.perf_counter() - began)
        return best

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes, as the worker counts them."""
        memory = self._connection.call(wire.GetDeviceMemory(self._number), wire.DeviceMemory)
        return min(memory.free, _MOST_BYTES), min(memory.total, _MOST_BYTES)

    def close(self) -> None:
        """Free all buffers. The last device of a worker closes the connection."""
        if self._closed:
            return
        self._closed = True
        self.worker_files.close()
        self._shared.open -= 1
        if not self._shared.open:
            self._connection.close()
        elif self.lost is None:
            with suppress(DeviceLost), self._connection.batch():
                for buffer in [*self._buffers]:
                    buffer.free()
        self._forget()

    def batch(self) -> AbstractContextManager[None]:
        """Send the requests of the block in one piece at its end. Do not wait for a future inside."""
        return self._connection.batch()

    def expect_answers(self, seconds: float) -> None:
        """Set the seconds after which a missing response means that the worker is lost."""
        self._connection.reply_timeout = seconds

    def flush(self) -> None:
        """Send writes that are held for the next request."""
        self._connection.flush()

    # --- memory -------------------------------------------------------------------------------------------------------

    def place(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        """Allocate zeroed memory for tensors. Raises DeviceError with the missing bytes."""
        return [*self._place(tensors, clear=True)]

    def load(
        self,
        weights: Sequence[tuple[Tensor, Bytes]],
        progress: LoadProgress | None = None,
    ) -> list[Buffer]:
        """Allocate memory for weights and fill it; returns when the worker has them all.

        The worker maps weights of its own files. Other large ones are tried by hash before they are sent.
        """
        for tensor, data in weights:
            if data.nbytes != tensor.nbytes:
                raise DeviceError(f"{data.nbytes} bytes for tensor {tensor.name} of {tensor.nbytes}")
        self.announce_weights(weights)
        # A weight that the worker is to map must lie in its page as in the file.
        inside = {t.name: data.ctypes.data % _PAGE for t, data in weights if self.worker_files.is_mapped(t.name)}
        buffers = self._place([tensor for tensor, _ in weights], clear=False, inside=inside)
        try:
            items = [Weight(tensor.name, self._wire(tensor), data) for tensor, data in weights]
            items = self.worker_files.bind(items, progress)
            sent = {item.name for item in items}
            for tensor, data in weights:
                if tensor.name not in sent:
                    self._bound(tensor)[0].local_weight_bytes += data.nbytes
            threshold = OWN_HASH_THRESHOLD if self.is_ours else HASH_THRESHOLD
            send_weights(self._connection, items, progress, self.hashes, threshold)
        except BaseException:
            for buffer in buffers:
                buffer.free()
            raise
        for hashes in (self.hashes, self.worker_files.digests):
            if isinstance(hashes, KnownHashes):
                hashes.save()
        return [*buffers]

    def announce_weights(self, weights: Sequence[tuple[Tensor, Bytes]]) -> None:
        """Offer weights to the worker. Both sides start to hash those that its own files may hold."""
        self.worker_files.announce([(tensor.name, data) for tensor, data in weights])

    @property
    def local_weight_bytes(self) -> int:
        """Bytes of weights from the worker's own files."""
        return sum(buffer.local_weight_bytes for buffer in [*self._buffers])

    def _place(
        self, tensors: Sequence[Tensor], clear: bool, inside: Mapping[str, int] | None = None
    ) -> list[RemoteBuffer]:
        """Allocate memory for tensors. `inside`: byte of a page at which a tensor starts, by name."""
        self._raise_failure()
        for tensor in tensors:
            if tensor.view_src is not None:
                raise DeviceError(f"tensor {tensor.name or '?'} is a view: place what it views")
        sizes = self._alloc_sizes(tensors)
        groups: list[tuple[int, list[tuple[Tensor, int]]]] = []
        group: list[tuple[Tensor, int]] = []
        at = end = 0
        for tensor, size in zip(tensors, sizes, strict=True):
            step = max(self._alignment, _PAGE) if self.is_ours and size > OWN_HASH_THRESHOLD else self._alignment
            first = (inside or {}).get(tensor.name)
            at = -(-at // step) * step if first is None else at + (first - at) % _PAGE
            size = -(-max(size, 1) // self._alignment) * self._alignment
            if size > self._max_size:
                raise DeviceError(
                    f"tensor {tensor.name or '?'} has {_mb(size)}; {self.name} takes at most {_mb(self._max_size)}"
                )
            if at + size > self._max_size:
                groups.append((end, group))
                group, at = [], first or 0
            group.append((tensor, at))
            at = end = at + size
        if group:
            groups.append((end, group))
        buffers = self._allocate([size for size, _ in groups], clear)
        for buffer, (_, group) in zip(buffers, groups, strict=True):
            for tensor, at in group:
                tensor.buffer, tensor.offset = buffer, at
        if not self.is_ours:
            with self._connection.batch():
                for tensor in tensors:
                    if _is_padded(tensor):
                        self._connection.send(wire.write_request(wire.InitTensor(self._wire(tensor))))
        return buffers

    def _allocate(self, sizes: Sequence[int], clear: bool) -> list[RemoteBuffer]:
        """Allocate buffers of these sizes, all or none. Raises DeviceFull."""
        connection, total = self._connection, sum(sizes)
        if total >= _ASK_FIRST:
            self._check_room(total)
        with connection.batch():
            futures = [connection.start_call(wire.AllocBuffer(self._number, size)) for size in sizes]
        given = [connection.wait_for(future, wire.AllocResponse) for future in futures]
        if not all(one.ptr and one.size >= size for one, size in zip(given, sizes, strict=True)):
            for one in given:
                if one.ptr:
                    connection.send(wire.write_request(wire.FreeBuffer(one.ptr)))
            self._shared.freed += 1
            self._check_room(total)
            raise DeviceFull(f"{self.name} has no room for {_mb(total)} more")
        with connection.batch():
            bases = [connection.start_call(wire.BufferGetBase(one.ptr)) for one in given]
            if clear and not self.is_ours:  # our workers allocate zeroed pages
                for one in given:
                    connection.send(wire.write_request(wire.BufferClear(one.ptr, 0)))
        buffers = [
            RemoteBuffer(self, one.ptr, connection.wait_for(base, wire.Number).value, min(one.size, _MOST_BYTES))
            for one, base in zip(given, bases, strict=True)
        ]
        for buffer in buffers:
            if buffer.base + buffer.size > _ADDRESSES:
                where = f"{_mb(buffer.size)} at address {buffer.base:#x}"
                raise DeviceError(f"{self.name} gave {where}, which end beyond the last address")
        self._buffers.update(buffers)
        return buffers

    def _check_room(self, size: int) -> None:
        free, total = self.memory()
        if size > free:
            raise DeviceFull(
                f"{self.name} lacks {_mb(size - free)}: {_mb(size)} are needed, {_mb(free)} of {_mb(total)} are free"
            )

    def _free(self, buffer: RemoteBuffer) -> None:
        connection = self._connection
        with connection.sending:
            ptr, buffer.ptr = buffer.ptr, 0
            buffer.sent_inputs.clear()
            self._buffers.discard(buffer)
            self._forget()
            self._shared.freed += 1
            with suppress(DeviceLost):
                connection.send(wire.write_request(wire.FreeBuffer(ptr)))

    def _forget(self) -> None:
        """Drop prepared graphs, since buffers they name were freed."""
        self._prepared.clear()
        self._prepared_bytes = 0

    def _alloc_sizes(self, tensors: Sequence[Tensor]) -> list[int]:
        """Return the bytes each tensor needs. A back end of a ggml worker may need more than the tensor has."""
        sizes = [tensor.nbytes for tensor in tensors]
        if self.is_ours:
            return sizes
        keys: list[tuple[Any, ...] | None] = []
        futures: dict[tuple[Any, ...], Future[wire.Response]] = {}
        connection = self._connection
        with connection.batch():
            for tensor in tensors:
                key = None
                if _is_padded(tensor) or tensor.op in _MAY_EXPAND:
                    srcs = tuple((s.type, s.ne, s.nb) if s is not None else None for s in tensor.src)
                    key = (tensor.type, tensor.ne, tensor.nb, tensor.op, tensor.op_params, srcs)
                    if key not in self._sizes and key not in futures:
                        absent = wire.WireTensor(0, 0, 0, (0, 0, 0, 0), (0, 0, 0, 0), 0)
                        given = [absent if s is None else wire_tensor(s, 0, 0, i) for i, s in enumerate(tensor.src, 2)]
                        request = wire.GetAllocSize(self._number, wire_tensor(tensor, 0, 0), tuple(given))
                        futures[key] = connection.start_call(request)
                keys.append(key)
        for key, future in futures.items():
            self._sizes[key] = min(connection.wait_for(future, wire.Number).value, _MOST_BYTES)
        return [size if key is None else max(size, self._sizes[key]) for size, key in zip(sizes, keys, strict=True)]

    def _bound(self, tensor: Tensor) -> tuple[RemoteBuffer, int]:
        """Return the buffer of a tensor and the offset in it."""
        root, inside = tensor.root()
        buffer = root.buffer
        if not isinstance(buffer, RemoteBuffer) or buffer.device._connection is not self._connection or not buffer.ptr:
            where = "has no memory" if buffer is None else "is not"
            raise DeviceError(f"tensor {tensor.name or '?'} {where} on {self.name}")
        at = root.offset + inside
        if at < 0 or at + tensor.nbytes > buffer.size:
            raise DeviceError(f"tensor {tensor.name or '?'} ends at byte {at + tensor.nbytes} of {buffer.size}")
        return buffer, at

    def _wire(self, tensor: Tensor) -> wire.WireTensor:
        buffer, at = self._bound(tensor)
        return wire_tensor(tensor, buffer.ptr, buffer.base + at)

    # --- data ---------------------------------------------------------------------------------------------------------

    def write(self, tensor: Tensor, data: NDArray[Any], offset: int = 0) -> None:
        """Copy the bytes of `data` to byte `offset`. Small writes leave with the next request."""
        self._raise_failure()
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if offset < 0 or offset + source.nbytes > tensor.nbytes:
            raise DeviceError(f"{source.nbytes} bytes at {offset} do not fit tensor {tensor.name} of {tensor.nbytes}")
        with self._connection.sending:
            buffer, at = self._bound(tensor)
            if tensor.flags & _INPUT and tensor.op is Op.NONE and tensor.view_src is None:
                first, end = buffer.sent_inputs.write(at, offset, source)
                source, offset = source[first:end], offset + first
            else:
                buffer.sent_inputs.forget(at + offset, at + offset + source.nbytes)
            if not source.nbytes:
                return
            head = wire.write_request(wire.SetTensor(self._wire(tensor), 0, offset, source.nbytes))
            if source.nbytes <= _SMALL:
                self._connection.hold(head, source.tobytes())
            else:
                self._connection.send_bulk(head, source)

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        """Read `size` bytes of a bound tensor, after all earlier requests.

        Callbacks of the future run on the receiving thread and must not wait for this device.
        """
        self._raise_failure()
        if offset < 0 or size < 0 or offset + size > tensor.nbytes:
            raise DeviceError(f"bytes {offset} to {offset + size} of tensor {tensor.name or '?'} of {tensor.nbytes}")
        with self._connection.sending:
            place = self._wire(tensor)
            if size:
                return self._connection.fetch(wire.GetTensor(place, offset, size))
        nothing: Future[Bytes] = Future()
        nothing.set_result(np.empty(0, np.uint8))
        return nothing

    def link(self, target: Device) -> RemoteLink | None:
        """Return a link to a device of another worker of ours, None if this one cannot reach it or links are off."""
        if not (self.links and target.links and isinstance(target, RemoteDevice)):
            return None
        if target._connection is self._connection:
            return None
        return RemoteLink.open(
            End(self._connection, self.name, self._wire), End(target._connection, target.name, target._fill)
        )

    def _fill(self, tensor: Tensor) -> wire.WireTensor:
        """Return a tensor that a link is about to fill."""
        buffer, at = self._bound(tensor)
        buffer.sent_inputs.forget(at, at + tensor.nbytes)
        return wire_tensor(tensor, buffer.ptr, buffer.base + at)

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes between bound tensors of this worker; they may overlap."""
        self._raise_failure()
        n = source.nbytes
        if n != target.nbytes:
            raise DeviceError(f"copy of {n} bytes to a tensor of {target.nbytes}")
        with self._connection.sending:
            (from_buffer, start), (to_buffer, end) = self._bound(source), self._bound(target)
            to_buffer.sent_inputs.forget(end, end + n)
            apart = abs(end - start) if from_buffer is to_buffer else n
            if not n or not apart:
                return
            if self.is_ours or apart >= n:
                steps, through = _steps(n, min(n, _COPY_STEP), end < start), None
            elif n <= apart * _MOST_STEPS:
                steps, through = _steps(n, apart, end < start), None
            else:
                through = self._compute_buffer(min(n, _ASK_FIRST))
                steps = _steps(n, min(n, through.size), end < start)
            for at, length in steps:
                if through is None:
                    self._copy_bytes((from_buffer, start + at), (to_buffer, end + at), length)
                else:
                    self._copy_bytes((from_buffer, start + at), (through, 0), length)
                    self._copy_bytes((through, 0), (to_buffer, end + at), length)

    def _copy_bytes(self, source: tuple[RemoteBuffer, int], target: tuple[RemoteBuffer, int], n: int) -> None:
        src, dst = (_raw(buffer, at, n) for buffer, at in (source, target))
        connection = self._connection
        if self._copies is None:  # only a try shows if the worker's back end can copy
            self._copies = bool(connection.call(wire.CopyTensor(src, dst), wire.Number).value)
            if self._copies:
                return
        if self._copies:
            connection.start_call(wire.CopyTensor(src, dst)).add_done_callback(self._copied)
        else:
            future = connection.fetch(wire.GetTensor(src, 0, n))
            connection.flush()
            connection.send_bulk(wire.write_request(wire.SetTensor(dst, 0, 0, n)), future.result())

    def _copied(self, answer: Future[wire.Response]) -> None:
        if answer.exception() is None and answer.result() != wire.Number(1):
            self._failure = DeviceError(f"{self.name} refused to copy a tensor")

    def _raise_failure(self) -> None:
        """Raise the error of an earlier request, if there was one."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # --- graphs -------------------------------------------------------------------------------------------------------

    def prepare(self, graph: Graph, quota: KernelQuota | None = None) -> object:
        """Encode a graph, and place its activations if the worker does not do so.

        The worker compiles kernels itself when it gets the graph.
        """
        self._raise_failure()
        with self._connection.sending:
            return self._prepare(graph)

    def launch(self, graph: Graph) -> None:
        self.submit(graph)

    def finish(self) -> None:
        """Return at once: `launch` has submitted the graph."""

    def submit(self, graph: Graph) -> None:
        """Compute a graph. It is sent by name if the worker still has it."""
        self._raise_failure()
        if not graph.nodes:
            return
        connection = self._connection
        with connection.sending:
            prepared = self._prepare(graph)  # may grow the compute buffer, so that the worker forgets
            if self._sent.can_rerun(prepared.uid, self._shared.freed):
                connection.send(
                    wire.write_request(wire.GraphRecompute(self._number, prepared.uid), connection.protocol)
                )
            else:
                connection.send(
                    *wire.graph_pieces(prepared.payload, prepared.uid, has_uid=connection.protocol.names_graphs)
                )

    def profile(self, graph: Graph, repeats: int = 20) -> list[OperationTime]:
        """Raises DeviceError: the protocol has no operation times."""
        raise DeviceError(f"{self.name} cannot time its operations")

    def drop_graphs(self, graphs: Iterable[Graph]) -> None:
        """Drop encoded graphs. The worker releases their working memory itself."""
        with self._connection.sending:
            for graph in graphs:
                prepared = self._prepared.pop(id(graph), None)
                self._prepared_bytes -= 0 if prepared is None else len(prepared.payload)

    def trim_memory(self) -> None:
        """Do nothing: the worker releases idle memory itself."""

    def abandon(self) -> None:
        """Do nothing: `submit` does not wait for a result."""

    def _prepare(self, graph: Graph) -> _PreparedGraph:
        prepared = self._prepared.get(id(graph))
        if prepared is not None:
            self._prepared.move_to_end(id(graph))
            return prepared
        for output in graph.outputs.values():
            self._bound(output)
        places: dict[Tensor, int] = {}
        base = ptr = 0
        lives = [*activations(graph)]
        if not self.is_ours and lives:
            sizes = dict(zip(lives, self._alloc_sizes(lives), strict=True))
            size, places = plan(graph, sizes.__getitem__, self._alignment)
            compute = self._compute_buffer(size)
            base, ptr = compute.base, compute.ptr

        def memory(tensor: Tensor) -> tuple[int, int]:
            root, inside = tensor.root()
            if root.buffer is not None:
                buffer, at = self._bound(tensor)
                return buffer.ptr, buffer.base + at
            return (ptr, base + places[root] + inside) if places else (0, 0)

        for root in {node.root()[0] for node in graph.nodes if not node.is_noop}:
            if root.buffer is not None:
                buffer, at = self._bound(root)
                buffer.sent_inputs.exclude(at, at + root.nbytes)
        prepared = _PreparedGraph(graph, wire_graph(self._number, graph, memory).payload, next(self._uids))
        self._prepared[id(graph)] = prepared
        self._prepared_bytes += len(prepared.payload)
        while self._prepared_bytes > _PAYLOADS_KEPT and len(self._prepared) > 1:
            self._prepared_bytes -= len(self._prepared.popitem(last=False)[1].payload)
        return prepared

    def _compute_buffer(self, size: int) -> RemoteBuffer:
        """Return the buffer of activations. It only grows."""
        compute = self._compute
        if compute is None or compute.size < size:
            if compute is not None:
                compute.free()
            self._compute = compute = self._allocate([size], clear=False)[0]
        return compute


def _is_padded(tensor: Tensor) -> bool:
    """Return True if back ends may pad a tensor's rows: quantized, and no multiple of 512 elements."""
    return tensor.type.block_size > 1 and tensor.ne[0] % 512 != 0 and tensor.view_src is None


def _raw(buffer: RemoteBuffer, at: int, n: int) -> wire.WireTensor:
    """Return `n` bytes of a buffer as a tensor."""
    return wire.WireTensor(1, int(TensorType.I8), buffer.ptr, (n, 1, 1, 1), (1, n, n, n), buffer.base + at)


def _steps(n: int, step: int, ascending: bool) -> list[tuple[int, int]]:
    """Return pieces (offset, length) of `n` bytes in an order in which none is overwritten before it is read."""
    pieces = [(at, min(step, n - at)) for at in range(0, n, step)]
    return pieces if ascending else pieces[::-1]


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"
