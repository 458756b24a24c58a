"""The CUDA device: graphs compiled to launches on one card."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from llamado.devices.compile.compiler import SUPPORTED, Compiler, OperationEmitters
from llamado.devices.compile.emitter import Emitter, Target
from llamado.devices.compile.program import Constant, Programs, Temporary, plan
from llamado.devices.cuda.compile.attend import CardAttention
from llamado.devices.cuda.compile.products import card_products
from llamado.devices.cuda.compile.teams import in_teams
from llamado.devices.cuda.driver import Card
from llamado.devices.cuda.graphs import LaunchSequence
from llamado.devices.cuda.jit import CudaJit, LoadedKernel
from llamado.devices.cuda.kernel import Images
from llamado.devices.cuda.lanes import GROUP, GROUPS
from llamado.devices.cuda.memory import CudaBuffer, Transfers
from llamado.devices.cuda.nvml import Nvml
from llamado.devices.cuda.program import BLOCK_THREADS, LoadedOperation, link, load
from llamado.devices.device import (
    Buffer,
    Bytes,
    Device,
    DeviceError,
    DeviceLost,
    KernelQuota,
    LoadProgress,
    OperationTime,
    TensorLink,
)
from llamado.devices.kernels.elements import SCALAR
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.numerics import numerics
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

_ALIGN = 256
_LEAST_ARENA = 1 << 20


@dataclass
class _Program:
    """The launches of a graph; see `compile.program.CompiledGraph`."""

    graph: Graph
    launches: LaunchSequence
    kernels: list[LoadedKernel]
    labels: list[str]
    size: int
    constants: CudaBuffer
    places: dict[Tensor, Temporary]

    def free(self) -> None:
        """Release its memory of the card."""
        self.launches.free()
        self.constants.free()


class CudaDevice:
    """Runs graphs on one card, for one caller at a time.

    A graph object that is submitted again is not compiled again: keep it and change the contents of its inputs.
    """

    def __init__(self, card: Card, images: Images) -> None:
        self.name = card.name
        self.card = card
        self.jit = CudaJit(card, images)
        self._transfers = Transfers(card)
        self._nvml = Nvml.open()
        self.n_groups = card.properties.processors * (BLOCK_THREADS // GROUP)
        """Groups of threads in a launch of a kernel in groups: one block for each processor."""
        self.reserve: Callable[[int], None] = lambda size: None
        self._arena = CudaBuffer(card, _LEAST_ARENA)
        self._programs: Programs[_Program] = Programs(_Program.free)

    local, zeroes_memory = False, True
    endpoint: None = None
    heartbeat_seconds = None
    links = False
    local_weight_bytes = 0

    @property
    def numerics(self) -> str:
        """The CPU device's: results have the same bits."""
        return numerics()

    @property
    def details(self) -> str:
        """The card's product name."""
        return self.card.properties.name

    @property
    def utilization(self) -> float | None:
        """Share of the last moments in which the card computed, for any process."""
        return None if self._nvml is None else self._nvml.utilization(self.card.properties.pci)

    @property
    def lost(self) -> DeviceLost | None:
        return self.card.lost

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        self.card.on_lost(callback)

    def link(self, target: Device) -> TensorLink | None:
        """Return None: the caller moves tensors."""
        return None

    def supports(self, op: Op, type: TensorType) -> bool:
        """Return True if there are kernels."""
        return op in SUPPORTED and (type in FORMATS or type in SCALAR)

    def memory(self) -> tuple[int, int]:
        return self.card.memory()

    # --- the stream ---

    def place(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        """Allocate zeroed memory for tensors."""
        offsets, size = _offsets([tensor.nbytes for tensor in tensors])
        if not size:
            return []
        buffer = CudaBuffer(self.card, size)
        for tensor, offset in zip(tensors, offsets, strict=True):
            tensor.buffer, tensor.offset = buffer, offset
        return [buffer]

    def announce_weights(self, weights: Sequence[tuple[Tensor, Bytes]]) -> None:
        """Do nothing: weights are copied when they are loaded."""

    def load(self, weights: Sequence[tuple[Tensor, Bytes]], progress: LoadProgress | None = None) -> list[Buffer]:
        """Copy weights to the card. Raise `DeviceError` for a type without a kernel, or `DeviceFull`."""
        for tensor, _ in weights:
            if tensor.type not in FORMATS:
                raise DeviceError(f"{self.name} has no kernel for {tensor.type.name}, the type of tensor {tensor.name}")
        offsets, size = _offsets([data.nbytes for _, data in weights])
        if not size:
            return []
        buffer = CudaBuffer(self.card, size)
        for offset, (tensor, data) in zip(offsets, weights, strict=True):
            self._transfers.write(buffer.address + offset, data, progress)
            tensor.buffer, tensor.offset = buffer, offset
        return [buffer]

    def write(self, tensor: Tensor, data: NDArray[Any], offset: int = 0) -> None:
        """Copy `data` into a bound tensor."""
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if offset < 0 or offset + source.nbytes > tensor.nbytes:
            raise DeviceError(f"{source.nbytes} bytes at {offset} do not fit tensor {tensor.name} of {tensor.nbytes}")
        self._transfers.write(self._address(tensor) + offset, source)

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[Bytes]:
        """Read bytes of a bound tensor, or of an output of the last graph."""
        return self._transfers.read(self._address(tensor) + offset, max(0, min(size, tensor.nbytes - offset)))

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes between bound tensors, which may overlap."""
        if source.nbytes != target.nbytes:
            raise DeviceError(f"copy of {source.nbytes} bytes to a tensor of {target.nbytes}")
        self.card.copy(self._address(target), self._address(source), source.nbytes)

    def _address(self, tensor: Tensor) -> int:
        """Address of a tensor's first byte."""
        root, inside = tensor.root()
        if root.buffer is not None:
            buffer = cast(CudaBuffer, root.buffer)
            start = root.offset + inside
            if start < 0 or start + tensor.nbytes > buffer.size:
                raise DeviceError(
                    f"tensor {tensor.name or '?'} ends at byte {start + tensor.nbytes} of a buffer of {buffer.size}"
                )
            return buffer.address + start
        if not tensor.nbytes:
            return self._arena.address
        place = self._programs.place(root)
        if place is not None:
            return self._arena.address + place.offset + inside
        raise DeviceError(f"tensor {tensor.name or '?'} was not computed here")

    def submit(self, graph: Graph) -> None:
        """Compute a graph: submit its launches. Reads wait for them."""
        (self._programs.get(graph) or self.prepare(graph)).launches.run()

    def launch(self, graph: Graph) -> None:
        self.submit(graph)

    def finish(self) -> None:
        """Do nothing: reads wait for the launches."""

    def prepare(self, graph: Graph, quota: KernelQuota | None = None) -> _Program:
        """Compile a graph without running it, unless that is done already."""
        compiled = self._programs.get(graph)
        if compiled is not None:
            return compiled
        target = Target(self.name, GROUPS, self.n_groups, CudaBuffer, aligned=True)
        compiler = Compiler(graph, target, self._emitters)
        operations = [in_teams(one, self.card.properties, self.n_groups) for one in compiler.compile()]
        self.jit.quota = quota
        try:
            loaded = load(operations, self.jit, self.n_groups)
        finally:
            self.jit.quota = None
        stack = -(-plan(operations, compiler.scratch) // _ALIGN) * _ALIGN
        size = stack + max((one.stack_size for one in loaded), default=0)
        self._grow(size)
        constants, addresses = self._copy_constants(compiler.constants)
        records = link(loaded, self._arena.address, self._arena.address + stack, addresses)
        labels = [_label(one) for one in loaded]
        places = {tensor: place for tensor, place in compiler.places.items() if place.keep}
        program = _Program(
            graph, LaunchSequence(self.card, records), [one.kernel for one in loaded], labels, size,
            constants, places,
        )  # fmt: skip
        self._programs.add(program)
        self.jit.unload(lambda: (kernel for kept in self._programs for kernel in kept.kernels))
        return program

    def _copy_constants(self, constants: Sequence[Constant]) -> tuple[CudaBuffer, dict[Constant, int]]:
        """Copy constants to the card. Return their buffer, and the address of each."""
        offsets, size = _offsets([constant.values.nbytes for constant in constants])
        buffer, addresses = CudaBuffer(self.card, size), {}
        for constant, offset in zip(constants, offsets, strict=True):
            addresses[constant] = buffer.address + offset
            self._transfers.write(addresses[constant], constant.values)
        return buffer, addresses

    def _emitters(self, out: Emitter) -> OperationEmitters:
        """Return the emitters of operations that have kernels of the card's own."""
        properties = self.card.properties
        attention = CardAttention(out, properties.processors, properties.shared_bytes)
        return {**card_products(properties, out), Op.FLASH_ATTN_EXT: attention.emit}

    def _grow(self, size: int) -> None:
        """Make the arena hold `size` bytes."""
        if size > self.working_bytes:
            self.reserve(size)
        if size > self._arena.size:
            self._programs.clear()  # they point into the old arena
            self._arena.free()
            self._arena = CudaBuffer(self.card, size + size // 4)

    @property
    def working_bytes(self) -> int:
        """Bytes of the arena that the kept programs need."""
        return self._programs.size

    def drop_graphs(self, graphs: Iterable[Graph]) -> None:
        """Drop the programs of graphs."""
        for graph in graphs:
            self._programs.drop(graph)

    def trim_memory(self) -> None:
        """Do nothing: a card's memory is not shared with what the system does meanwhile."""

    def abandon(self) -> None:
        """Do nothing: launches cannot be called back."""

    def profile(self, graph: Graph, repeats: int = 20) -> list[OperationTime]:
        """Run a graph and return the time of each operation: medians over `repeats` runs, in order."""
        self.submit(graph)
        program = self.prepare(graph)
        seconds = program.launches.profile(repeats)
        return [OperationTime(label, work, 0.0) for label, work in zip(program.labels, seconds, strict=True)]

    def close(self) -> None:
        """Release everything on the card."""
        self._programs.clear()
        self._arena.free()
        self._transfers.close()
        self.jit.close()
        self.card.close()


def _offsets(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return aligned offsets for pieces of these sizes, and the size of all."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // _ALIGN) * _ALIGN
    return offsets, at


def _label(loaded: LoadedOperation) -> str:
    return loaded.operation.label or loaded.operation.kernel.name
