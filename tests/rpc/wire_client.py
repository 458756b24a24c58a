"""A client under a test's full control, and builders of tensors and graphs for the wire."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import Device
from llamado.ggml.graph import Graph
from llamado.ggml.ops import MAX_SRC
from llamado.ggml.tensor import Tensor
from llamado.rpc import wire
from llamado.rpc.worker.server import Worker, WorkerOptions

WITH_ANSWERED_DATA = wire.GetTensor | wire.GetTensor2D | wire.Offer | wire.Bind


@contextmanager
def running(*devices: Device, **options: Any) -> Iterator[Worker]:
    """Yield a worker on a free port, served by a thread. It greets with 7.0, where graphs need no names."""
    worker = Worker(devices, WorkerOptions(**{"port": 0, "protocol": 7, **options}))
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(120)
        assert not thread.is_alive()


class Client:
    """One blocking connection to a worker or its port. `greet` False leaves HELLO to the test."""

    def __init__(self, worker: Worker | int, *, greet: bool = True, timeout: float = 60.0) -> None:
        port = worker if isinstance(worker, int) else worker.port
        self.sock: socket.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reader = wire.ResponseReader()
        self.protocol = wire.V7
        if greet:
            self.hello = self.ask(wire.Hello())
            assert isinstance(self.hello, wire.HelloResponse)
            self.protocol = wire.PROTOCOLS[self.hello.major]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, request: wire.Request, data: bytes = b"") -> None:
        self.sock.sendall(wire.write_request(request, self.protocol) + data)

    def ask(self, request: wire.Request) -> wire.Response:
        """Send a request and wait for its response."""
        command = wire.COMMANDS[type(request)]
        assert wire.has_response(command)
        self.reader.expect(command, request.size if isinstance(request, WITH_ANSWERED_DATA) else 0)
        self.send(request)
        while (got := self.reader.next()) is None:
            self._receive()
        return got[1]

    def number(self, request: wire.Request) -> int:
        answer = self.ask(request)
        assert isinstance(answer, wire.Number)
        return answer.value

    def _receive(self) -> None:
        data = self.sock.recv(1 << 16)
        if not data:
            raise ConnectionResetError("the worker closed the connection")
        self.reader.feed(data)

    def alloc(self, size: int, device: int = 0) -> tuple[int, int]:
        """Allocate a buffer. Returns its ptr and base."""
        answer = self.ask(wire.AllocBuffer(device, size))
        assert isinstance(answer, wire.AllocResponse) and answer.ptr and answer.size == size
        return answer.ptr, self.number(wire.BufferGetBase(answer.ptr))

    def set(self, tensor: wire.WireTensor, data: bytes, offset: int = 0, cache: int = 0) -> None:
        self.send(wire.SetTensor(tensor, cache, offset, len(data)), data)

    def get(self, tensor: wire.WireTensor, size: int, offset: int = 0) -> bytes:
        return self.data(wire.GetTensor(tensor, offset, size))

    def data(self, request: wire.GetTensor | wire.GetTensor2D | wire.Offer | wire.Bind) -> bytes:
        """Return the bytes of a response."""
        self.ask(request)
        size = request.size
        target = memoryview(bytearray(size))
        done = 0
        while done < size:
            got = self.reader.take(target[done:])
            if not got:
                self._receive()
            done += got
        return bytes(target)

    def is_closed(self) -> bool:
        """Wait until the worker closes the connection, discarding earlier bytes."""
        try:
            while self.sock.recv(1 << 16):
                pass
        except ConnectionResetError:
            pass
        return True


def raw(ptr: int, at: int, size: int, name: bytes = b"raw") -> wire.WireTensor:
    """Return `size` bytes at address `at` as a tensor of I8."""
    return wire.WireTensor(1, 24, ptr, (size, 1, 1, 1), (1, size, size, size), at, name=name)


def records(
    graph: Graph, ptr: int, base: int, places: dict[Tensor, int], *, flags: int = 16
) -> tuple[NDArray[np.uint64], NDArray[Any]]:
    """Return nodes and tensors of a graph. `places`: offsets of tensors in the buffer; others have none."""
    order: dict[Tensor, int] = {}

    def add(tensor: Tensor) -> None:
        if tensor in order:
            return
        for source in (*tensor.src, tensor.view_src):
            if source is not None and source is not tensor:
                add(source)
        order[tensor] = 0x1000 + 16 * len(order)

    for node in graph.nodes:
        add(node)
    counts = graph.use_counts()
    made = np.zeros(len(order), wire.TENSOR)
    for record, (tensor, number) in zip(made, order.items(), strict=True):
        root, inside = tensor.root()
        if root in places:
            record["buffer"], record["data"] = ptr, base + places[root] + inside
        record["id"], record["type"], record["op"], record["flags"] = number, tensor.type, tensor.op, tensor.flags
        if tensor in graph.nodes:
            record["flags"] |= flags
        record["ne"], record["nb"], record["op_params"] = tensor.ne, tensor.nb, np.void(tensor.op_params)
        record["src"] = [order[s] if s is not None else 0 for s in tensor.src] + [0] * (MAX_SRC - len(tensor.src))
        record["view_src"] = order[tensor.view_src] if tensor.view_src is not None else 0
        record["view_offs"], record["name"] = tensor.view_offs, tensor.name.encode()[:63]
        record["use_count"] = counts.get(tensor, 0)
    return np.array([order[node] for node in graph.nodes], "<u8"), made


def request(graph: Graph, ptr: int, base: int, places: dict[Tensor, int], device: int = 0) -> wire.GraphCompute:
    """Return a GRAPH_COMPUTE."""
    return wire.graph_request(device, *records(graph, ptr, base, places))


def wire_of(tensor: Tensor, ptr: int, at: int) -> wire.WireTensor:
    """Return a bound tensor as in SET_TENSOR and GET_TENSOR."""
    return wire.WireTensor(7, int(tensor.type), ptr, tensor.ne, tensor.nb, at, name=tensor.name.encode())


def layout(tensors: Sequence[Tensor], gap: int = 0) -> tuple[dict[Tensor, int], int]:
    """Return places for tensors, 64-byte aligned with `gap` bytes between them, and the size of the buffer."""
    places: dict[Tensor, int] = {}
    at = gap
    for tensor in tensors:
        at = -(-at // 64) * 64
        places[tensor] = at
        at += tensor.nbytes + gap
    return places, at
