"""A stand-in for graphics cards: devices named CUDA0, CUDA1, … that compute on the CPU, with memory of their own.

A card copies its weights, hands out copies, has a limited memory, and can be lost or full at any call.
`install(monkeypatch, Cards(...))` registers it as the kind "cuda".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import pytest

from llamado.devices import registry
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.device import Bytes, DeviceError, DeviceFull, DeviceLost, KernelQuota, OperationTime
from llamado.devices.registry import DeviceOptions, WaitCallback
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType


@dataclass
class Cards:
    """The cards of a test's machine, and everything that happens to them.

    `sizes`: bytes of memory of each. `lacks`: operations that card i does not have. `problem`: the reason why there are
    none. `away`: names of cards that cannot be opened again. `before` is called with a card and the name of each of its
    methods; it may raise, or let the card die. `opened`: all devices, in order.
    """

    sizes: Sequence[int] = (1 << 30,)
    lacks: dict[int, set[Op]] = field(default_factory=dict)
    problem: str = ""
    away: set[str] = field(default_factory=set)
    before: Callable[[Card, str], None] = lambda card, what: None
    opened: list[Card] = field(default_factory=list)
    jit: Jit = field(default_factory=Jit)

    def card(self, number: int = 0) -> Card:
        """The device of a card that was opened last."""
        return next(card for card in reversed(self.opened) if card.number == number)


class CardBuffer(CpuBuffer):
    """Memory of a card, counted until it is freed."""

    def __init__(self, card: Card, inner: CpuBuffer, size: int) -> None:
        super().__init__(inner.memory)
        self._card, self._inner, self._counted = card, inner, size

    def lock(self) -> bool:
        return True

    def free(self) -> None:
        self._card.used -= self._counted
        self._counted = 0


class Card:
    """A card."""

    local, zeroes_memory, endpoint, links = False, False, None, False
    heartbeat_seconds = None
    local_weight_bytes = 0
    utilization: float | None = 0.25

    def __init__(self, machine: Cards, number: int) -> None:
        self.name, self.number = f"CUDA{number}", number
        self.details = "Stand-in"
        self.lost: DeviceLost | None = None
        self.reserve: Callable[[int], None] = lambda size: None
        self.loaded: list[str] = []
        self.placed: list[str] = []
        self.computed = self.used = 0
        self.closed = False
        self.machine = machine
        self._device = CpuDevice(1, jit=machine.jit)
        self._callbacks: list[Callable[[DeviceLost], None]] = []
        self._one_at_a_time = threading.Lock()

    @property
    def numerics(self) -> str:
        return self._device.numerics

    def supports(self, op: Op, type: TensorType) -> bool:
        return op not in self.machine.lacks.get(self.number, ()) and self._device.supports(op, type)

    def memory(self) -> tuple[int, int]:
        size = self.machine.sizes[self.number]
        return size - self.used, size

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        self._callbacks.append(callback)

    def die(self, why: str = "it has fallen off the bus") -> None:
        self.lost = DeviceLost(self.name, why)
        for callback in self._callbacks:
            callback(self.lost)

    @contextmanager
    def _alone(self, what: str) -> Iterator[CpuDevice]:
        assert not self.closed, f"{what} of a closed device"
        assert self._one_at_a_time.acquire(blocking=False), "two callers at a time"
        try:
            self.machine.before(self, what)
            self._check()
            yield self._device
            self._check()
        finally:
            self._one_at_a_time.release()

    def _check(self) -> None:
        if self.lost is not None:
            raise DeviceLost(self.name, self.lost.why)

    def _take(self, tensors: Iterable[Tensor]) -> int:
        size = sum(tensor.nbytes for tensor in tensors)
        if size > self.memory()[0]:
            raise DeviceFull(f"{self.name}: cannot allocate {size} bytes of {self.memory()[0]}")
        self.used += size
        return size

    def place(self, tensors: Sequence[Tensor]) -> list[CardBuffer]:
        with self._alone("place") as device:
            size = self._take(tensors)
            (inner,) = device.place(tensors)
            self.placed += [tensor.name for tensor in tensors]
            buffer = CardBuffer(self, cast(CpuBuffer, inner), size)
            for tensor in tensors:
                tensor.buffer = buffer
            return [buffer]

    def announce_weights(self, weights: Sequence[tuple[Tensor, Bytes]]) -> None:
        self._check()

    def load(
        self, weights: Sequence[tuple[Tensor, Bytes]], progress: Callable[[int], None] | None = None
    ) -> list[CardBuffer]:
        with self._alone("load") as device:
            self._take(tensor for tensor, _ in weights)
            device.load([(tensor, data.copy()) for tensor, data in weights], progress)
            self.loaded += [tensor.name for tensor, _ in weights]
            buffers = []
            for tensor, _ in weights:
                tensor.buffer = CardBuffer(self, cast(CpuBuffer, tensor.buffer), tensor.nbytes)
                buffers.append(tensor.buffer)
            return buffers

    def write(self, tensor: Tensor, data: Any, offset: int = 0) -> None:
        with self._alone("write") as device:
            device.write(tensor, data, offset)

    def prepare(self, graph: Graph, quota: KernelQuota | None = None) -> object:
        with self._alone("prepare") as device:
            for node in graph.nodes:
                assert node.is_noop or self.supports(node.op, (node.source(0) or node).type), node.op
            return device.prepare(graph, quota)

    def submit(self, graph: Graph) -> None:
        with self._alone("submit") as device:
            device.submit(graph)
            self.computed += 1

    def launch(self, graph: Graph) -> None:
        self.submit(graph)

    def finish(self) -> None: ...

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        future: Future[Bytes] = Future()
        with self._alone("read") as device:
            data = device.read(tensor, offset, size).result().copy()
        future.set_result(data)
        return future

    def copy(self, source: Tensor, target: Tensor) -> None:
        with self._alone("copy") as device:
            device.copy(source, target)

    def link(self, target: Any) -> None:
        return None

    def profile(self, graph: Graph, repeats: int = 20) -> list[OperationTime]:
        return self._device.profile(graph, repeats)

    @property
    def working_bytes(self) -> int:
        return self._device.working_bytes

    def drop_graphs(self, graphs: Iterable[Graph]) -> None:
        self._device.drop_graphs(graphs)

    def trim_memory(self) -> None:
        self._device.trim_memory()

    def abandon(self) -> None:
        self._device.abandon()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._device.close()


class CardBackend:
    """The back end of the cards that `install` has set."""

    machine: ClassVar[Cards]

    def __init__(self, places: Sequence[str], options: DeviceOptions) -> None:
        assert not places

    def connect(self, timeout: float | None = None) -> list[list[Card]]:
        return [self.devices()]

    def devices(self, wait: float = 0.0, waiting: WaitCallback | None = None) -> list[Card]:
        if self.machine.problem:
            raise DeviceError(self.machine.problem)
        return [self._open(i) for i in range(len(self.machine.sizes))]

    def reconnect(self, lost: Card, timeout: float = 2.0) -> Card:
        assert lost.closed
        if lost.name in self.machine.away:
            raise DeviceLost(lost.name, "the driver does not list it any more")
        return self._open(lost.number)

    def _open(self, number: int) -> Card:
        self.machine.opened.append(Card(self.machine, number))
        return self.machine.opened[-1]

    def expect_answers(self, seconds: float | None) -> None: ...

    def open(self, place: str) -> list[Card]:
        raise DeviceError(f"a card has no place: {place}")

    def add(self, place: str, devices: Sequence[Card]) -> None: ...

    def remove(self, place: str) -> None: ...

    def weight_types(self) -> frozenset[TensorType]:
        return frozenset(TensorType)


def install(monkeypatch: pytest.MonkeyPatch, machine: Cards) -> Cards:
    """Register the cards as the only accelerators of this machine."""
    monkeypatch.setattr(CardBackend, "machine", machine, raising=False)
    monkeypatch.setitem(registry._LOCAL_KINDS, "cuda", "stand_in_cards:CardBackend")
    return machine
