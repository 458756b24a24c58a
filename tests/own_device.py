"""A device that is none of ours: the whole contract in numpy, with the reference's arithmetic; and its back end.

`OwnBackend` stands in the registry's place for any kind; it makes devices of this process that use weights where they
are ("cpu" has no places), or that keep copies, hand out copies and can be lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from reference import RULES, ReferenceDevice

from llamado.devices.device import DeviceError, DeviceLost, KernelQuota, OperationTime
from llamado.devices.registry import DeviceOptions, Unreachable, WaitCallback
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Place:
    host: str


class OwnBuffer:
    def __init__(self, data: Bytes, local: bool) -> None:
        self.data, self.size = data, data.nbytes
        self.memory = data if local else None
        self.locked = self.freed = False

    def lock(self) -> bool:
        self.locked = True
        return True

    def free(self) -> None:
        self.freed = True


class OwnDevice:
    """`endpoint` None: of this process, on weights where they are."""

    details = "numpy"
    dtype: type[np.floating[Any]] = np.float64
    """Type of its computations."""

    def __init__(self, name: str, endpoint: Place | None = None, free: int = 1 << 30) -> None:
        self.name, self.endpoint = name, endpoint
        self.local = self.zeroes_memory = endpoint is None
        self.lost: DeviceLost | None = None
        self.reserve: Callable[[int], None] = lambda size: None
        self.working_bytes = 0
        self.closed = False
        self.computed = 0
        """Graphs."""
        self.weights: list[str] = []
        self.buffers: list[OwnBuffer] = []
        self.left: int | None = None
        """Graphs after which it is lost."""
        self._launched: Graph | None = None
        self._free = free
        self._callbacks: list[Callable[[DeviceLost], None]] = []
        self._one_at_a_time = threading.Lock()

    def supports(self, op: Op, type: TensorType) -> bool:
        return op in RULES

    def memory(self) -> tuple[int, int]:
        self._check()
        return self._free, self._free

    heartbeat_seconds: float | None = None
    utilization: float | None = None
    links = False

    def link(self, target: Any) -> None:
        return None

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        self._callbacks.append(callback)

    def die(self) -> None:
        self.lost = DeviceLost(self.name, "its power cable was unplugged")
        for callback in self._callbacks:
            callback(self.lost)

    def _check(self) -> None:
        self.finish()
        assert not self.closed
        if self.lost is not None:
            raise DeviceLost(self.name, self.lost.why)

    def place(self, tensors: Sequence[Tensor]) -> list[OwnBuffer]:
        self._check()
        return [self._bind(tensor, np.zeros(tensor.nbytes, np.uint8)) for tensor in tensors]

    local_weight_bytes = 0
    numerics = "own"

    def announce_weights(self, weights: Sequence[tuple[Tensor, Bytes]]) -> None:
        self._check()

    def load(self, weights: Sequence[tuple[Tensor, Bytes]], progress: Any = None) -> list[OwnBuffer]:
        self._check()
        self.weights += [tensor.name for tensor, _ in weights]
        return [self._bind(tensor, data if self.local else data.copy()) for tensor, data in weights]

    def _bind(self, tensor: Tensor, data: Bytes) -> OwnBuffer:
        tensor.buffer = buffer = OwnBuffer(data, self.local)
        tensor.offset = 0
        self.buffers.append(buffer)
        return buffer

    def _view(self, tensor: Tensor) -> Bytes:
        """The bytes of a bound tensor."""
        root, inside = tensor.root()
        assert root.buffer in self.buffers, f"{tensor.name} is not on {self.name}"
        data: Bytes = root.buffer.data[root.offset + inside :]  # type: ignore[union-attr]
        return data[: tensor.nbytes]

    def write(self, tensor: Tensor, data: Any, offset: int = 0) -> None:
        self._check()
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self._view(tensor)[offset : offset + source.nbytes] = source

    def prepare(self, graph: Graph, quota: KernelQuota | None = None) -> None:
        self._check()
        for node in graph.nodes:
            if not node.is_noop and not self.supports(node.op, node.type):
                raise DeviceError(f"{self.name} has no {node.op.name}")

    def launch(self, graph: Graph) -> None:
        """Defer all computation until the caller waits for the result."""
        self.prepare(graph)
        self._launched = graph

    def finish(self) -> None:
        graph, self._launched = self._launched, None
        if graph is not None:
            self.submit(graph)

    def submit(self, graph: Graph) -> None:
        if self.left is not None and not self.left:
            self.die()
        self.left = None if self.left is None else self.left - 1
        self.prepare(graph)
        assert self._one_at_a_time.acquire(blocking=False), "two callers at a time"
        try:
            numbers = ReferenceDevice(self.dtype)
            for node in graph.nodes:
                for tensor in (node, *node.src):
                    root = None if tensor is None else tensor.root()[0]
                    if root is not None and root.buffer is not None:
                        numbers.memory[root] = self._view(root)
            for node in graph.nodes:
                numbers.compute(node)
            self.computed += 1
        finally:
            self._one_at_a_time.release()

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        self._check()
        future: Future[Bytes] = Future()
        data = self._view(tensor)[offset : offset + size]
        future.set_result(data if self.local else data.copy())
        return future

    def copy(self, source: Tensor, target: Tensor) -> None:
        self._check()
        self._view(target)[:] = self._view(source).copy()

    def profile(self, graph: Graph, repeats: int = 20) -> list[OperationTime]:
        self.submit(graph)
        return [OperationTime(node.op.name, 1e-3, 0.0) for node in graph.nodes if not node.is_noop]

    def drop_graphs(self, graphs: Iterable[Graph]) -> None: ...

    def trim_memory(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None:
        self.finish()
        self.closed = True


class OwnBackend:
    """Remembers every device it made."""

    made: list[OwnDevice]

    def __init__(self, places: Sequence[str], options: DeviceOptions) -> None:
        self.places, self.options = places, options

    def connect(self, timeout: float | None = None) -> list[list[OwnDevice] | Unreachable]:
        return [[device] for device in self.devices()]

    def devices(self, wait: float = 0.0, waiting: WaitCallback | None = None) -> list[OwnDevice]:
        new = [OwnDevice(f"OWN{i}[{place}]", Place(place)) for i, place in enumerate(self.places)] or [
            OwnDevice("HERE")
        ]
        type(self).made += new
        return new

    def reconnect(self, lost: OwnDevice, timeout: float = 2.0) -> OwnDevice:
        assert lost.lost is not None and lost.closed
        new = OwnDevice(lost.name, lost.endpoint)
        type(self).made.append(new)
        return new

    def expect_answers(self, seconds: float | None) -> None:
        pass

    def open(self, place: str) -> list[OwnDevice]:
        new = [OwnDevice(f"OWN[{place}]", Place(place))]
        type(self).made += new
        return new

    def add(self, place: str, devices: Sequence[OwnDevice]) -> None:
        pass

    def remove(self, place: str) -> None:
        pass

    def weight_types(self) -> frozenset[TensorType]:
        return frozenset(TensorType)
