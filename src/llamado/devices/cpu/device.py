"""The CPU device: graphs compiled to programs of machine code, run by a thread team."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from llamado.devices import limits
from llamado.devices.compile.compiler import SUPPORTED, Compiler
from llamado.devices.compile.emitter import Target
from llamado.devices.compile.program import Constant, Programs, Temporary, plan
from llamado.devices.cpu.jit import Jit
from llamado.devices.cpu.memory import CpuBuffer, view_of
from llamado.devices.cpu.numa import Matrix, NumaBinding
from llamado.devices.cpu.program import Program, link
from llamado.devices.cpu.read_ahead import ReadAhead
from llamado.devices.cpu.team import Team
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
from llamado.devices.lowering import Lowering
from llamado.devices.numerics import numerics
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.pages import request_mapped_huge_pages
from llamado.gguf.types import TensorType

_LONG = 32 << 20
"""Bytes from which on a tensor gets large pages even if only part of it is used: the loss is small beside it."""
_LEAST_ARENA = 1 << 16


@dataclass
class _CompiledGraph:
    """A program for some threads; see `compile.program.CompiledGraph`."""

    graph: Graph
    program: Program
    n_threads: int
    constants: list[Constant]
    places: dict[Tensor, Temporary]

    @property
    def size(self) -> int:
        return self.program.arena_size


def cpu_target(lowering: Lowering, n_threads: int) -> Target:
    """Return the target of graphs that `n_threads` threads of this process run."""
    return Target("CPU", lowering, n_threads, CpuBuffer)


class CpuDevice:
    """Runs graphs on this machine's cores, for one caller at a time.

    `n_threads` serve small batches (None: one per core), `n_threads_batch` larger ones. A graph object that is
    submitted again is not compiled again: keep it and change the contents of its inputs.
    """

    def __init__(
        self,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        jit: Jit | None = None,
        numa: str | None = None,
    ) -> None:
        """`numa`: thread pinning on NUMA machines, "distribute", "isolate" or "numactl"."""
        self.name = "CPU"
        self.n_threads = n_threads or limits.cores()
        self.n_threads_batch = n_threads_batch or self.n_threads
        self._numa = NumaBinding(numa, self.n_threads)
        self.jit = jit or Jit()
        self.team = Team(self.jit, max(self.n_threads, self.n_threads_batch), self._numa)
        self.reserve: Callable[[int], None] = lambda size: None
        self.read_ahead = ReadAhead(self._free_for_weights)
        self._allocated: WeakSet[CpuBuffer] = WeakSet()
        self._counting = threading.Lock()  # memory is allocated from any thread
        self._arena = CpuBuffer.allocate(_LEAST_ARENA)
        self._programs: Programs[_CompiledGraph] = Programs()

    local, zeroes_memory = True, False
    endpoint: None = None
    lost: DeviceLost | None = None

    @property
    def numerics(self) -> str:
        """Versions of the kernels and of the compiler."""
        return numerics()

    @property
    def details(self) -> str:
        """The number of threads that serve small batches."""
        return f"{self.n_threads} thread{'s' if self.n_threads != 1 else ''}"

    heartbeat_seconds = utilization = None
    links = False

    def link(self, target: Device) -> TensorLink | None:
        """Return None: the caller moves tensors within this process."""
        return None

    def on_lost(self, callback: Callable[[DeviceLost], None]) -> None:
        """Do nothing: the CPU device lives as long as the process."""

    def supports(self, op: Op, type: TensorType) -> bool:
        """Return True if there are kernels."""
        return op in SUPPORTED and (type in FORMATS or type in SCALAR)

    def alloc(self, size: int) -> CpuBuffer:
        """Allocate zeroed memory; its pages are taken when they are first touched."""
        buffer = CpuBuffer.allocate(size)
        with self._counting:
            self._allocated.add(buffer)
        return buffer

    def adopt(self, memory: NDArray[np.uint8]) -> CpuBuffer:
        """Wrap memory of the caller, without a copy."""
        return CpuBuffer(memory)

    def place(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        """Allocate one zeroed buffer for all tensors, each on a cache line of its own."""
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.nbytes // 64) * 64
        buffer = self.alloc(size)
        for tensor, offset in zip(tensors, offsets, strict=True):
            tensor.buffer, tensor.offset = buffer, offset
            if tensor.nbytes >= _LONG:
                buffer.expect_all(offset, tensor.nbytes)
        return [buffer]

    local_weight_bytes = 0

    def announce_weights(self, weights: Sequence[tuple[Tensor, Bytes]]) -> None:
        """Do nothing: weights are used in place."""

    def load(self, weights: Sequence[tuple[Tensor, Bytes]], progress: LoadProgress | None = None) -> list[Buffer]:
        """Bind weights to their bytes (a mapped file), without a copy. Raise `DeviceError` for a type without a
        kernel.
        """
        for tensor, _ in weights:
            if tensor.type not in FORMATS:
                raise DeviceError(
                    f"tensor {tensor.name} is of type {tensor.type.name}, which {self.name} has no kernel for; it has "
                    f"them for {', '.join(sorted(type.name for type in FORMATS))}"
                )
        buffers: list[CpuBuffer] = []
        for tensor, data in weights:
            buffer = self.adopt(data)
            tensor.buffer, tensor.offset = buffer, 0
            buffers.append(buffer)
            if progress is not None:
                progress(data.nbytes)
        self.read_ahead.add(buffers)
        if sum(buffer.size for buffer in buffers) <= self._free_for_weights():
            request_mapped_huge_pages((buffer.address, buffer.size) for buffer in buffers)
            self._numa.spread(
                Matrix(buffer.address, tensor.ne[1], tensor.nb[1], tensor.ne[2] * tensor.ne[3])
                for buffer, (tensor, _) in zip(buffers, weights, strict=True)
            )
        return [*buffers]

    def write(self, tensor: Tensor, data: NDArray[Any], offset: int = 0) -> None:
        """Copy `data` into a bound tensor."""
        self.finish()
        source = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        target = view_of(tensor)
        if offset < 0 or offset + source.nbytes > target.nbytes:
            raise DeviceError(f"{source.nbytes} bytes at {offset} do not fit tensor {tensor.name} of {target.nbytes}")
        root, inside = tensor.root()
        cast(CpuBuffer, root.buffer).expect_all(root.offset + inside + offset, source.nbytes)
        target[offset : offset + source.nbytes] = source

    def submit(self, graph: Graph) -> None:
        """Compute a graph and wait until it is done."""
        compiled = self._programs.get(graph) or self.prepare(graph)
        self.team.run(compiled.program.table, compiled.program.counters, compiled.n_threads)

    def launch(self, graph: Graph) -> None:
        """Start a graph on the other threads; the caller's thread joins in `finish`."""
        compiled = self._programs.get(graph) or self.prepare(graph)
        self.team.launch(compiled.program.table, compiled.program.counters, compiled.n_threads)

    def finish(self) -> None:
        """Wait for the launched graph. Every method that touches memory or programs calls this first."""
        self.team.join()

    def prepare(self, graph: Graph, quota: KernelQuota | None = None) -> _CompiledGraph:
        """Compile a graph without running it, unless that is done already."""
        self.finish()
        compiled = self._programs.get(graph)
        if compiled is not None:
            return compiled
        n_threads = self.n_threads if _columns(graph) <= 8 else self.n_threads_batch
        compiler = Compiler(graph, cpu_target(self.jit.lowering, n_threads))
        if self.read_ahead.stale:
            self._programs.clear()
            self.read_ahead.assess()
        operations = self.read_ahead.add_to(compiler.compile())
        size = plan(operations, compiler.scratch)
        if size > self.working_bytes:
            self.reserve(size)
        if size > self._arena.size:
            if size > self.memory()[1] // 2:
                raise DeviceError(
                    f"a graph needs {size / 1e6:.0f} MB of working memory, more than half of what this process may use"
                )
            # programs already linked point into the old arena
            self._programs.clear()
            self._arena.free()
            self._arena = CpuBuffer.allocate(size + size // 4)
            self._arena.expect_all(0, size)
        self.jit.quota = quota
        try:
            program = link(operations, self.jit, self._arena.address, size, self.team.n_counters)
        finally:
            self.jit.quota = None
        kept = {tensor: place for tensor, place in compiler.places.items() if place.keep}
        compiled = _CompiledGraph(graph, program, n_threads, compiler.constants, kept)
        self._programs.add(compiled)
        return compiled

    @property
    def working_bytes(self) -> int:
        """Bytes of the arena that the kept programs need."""
        return self._programs.size

    def drop_graphs(self, graphs: Iterable[Graph]) -> None:
        """Drop the programs of graphs, and the part of the arena that only they needed."""
        self.finish()
        before = self.working_bytes
        for graph in graphs:
            self._programs.drop(graph)
        if not self._programs:
            self._arena.free()
            self._arena = CpuBuffer.allocate(_LEAST_ARENA)
        elif (used := self.working_bytes) < before:
            self._arena.discard(used)

    def trim_memory(self) -> None:
        """Return the arena's pages to the OS. Programs are kept; outputs without a buffer are lost."""
        self.finish()
        self._arena.discard(0)

    def abandon(self) -> None:
        """Make the running program skip all work it has not begun."""
        self.team.abandon()

    def profile(self, graph: Graph, repeats: int = 20) -> list[OperationTime]:
        """Run a graph and return the time of each operation: medians over `repeats` runs, in order."""
        self.submit(graph)
        compiled = self.prepare(graph)
        program, n_threads = compiled.program, min(compiled.n_threads, self.team.n)
        times = np.zeros((repeats, len(program.table), n_threads, 3), np.int64)
        began = time.perf_counter()
        for run in times:
            self.team.run(program.table, program.counters, n_threads, run)
        seconds = time.perf_counter() - began
        cycles = float((times[:, -1].max(axis=(1, 2)) - times[:, 0].min(axis=(1, 2))).sum())
        wait = np.median((times[..., 1] - times[..., 0]).mean(axis=2), axis=0) * seconds / cycles
        work = np.median((times[..., 2] - times[..., 1]).mean(axis=2), axis=0) * seconds / cycles
        return [OperationTime(*row) for row in zip(program.labels, work.tolist(), wait.tolist(), strict=True)]

    def read(self, tensor: Tensor, offset: int, size: int) -> Future[NDArray[np.uint8]]:
        """Read bytes of a bound tensor, or of an output of the last graph. The future is done already."""
        self.finish()
        future: Future[NDArray[np.uint8]] = Future()
        future.set_result(self._bytes(tensor)[offset : offset + size])
        return future

    def _bytes(self, tensor: Tensor) -> NDArray[np.uint8]:
        root, inside = tensor.root()
        if root.buffer is not None:
            return view_of(tensor)
        if not tensor.nbytes:
            return np.empty(0, np.uint8)
        place = self._programs.place(root)
        if place is not None:
            start = place.offset + inside
            return self._arena.memory[start : start + tensor.nbytes]
        raise DeviceError(f"tensor {tensor.name or '?'} was not computed here")

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy bytes between bound tensors, which may overlap."""
        self.finish()
        if source.nbytes != target.nbytes:
            raise DeviceError(f"copy of {source.nbytes} bytes to a tensor of {target.nbytes}")
        np.copyto(view_of(target), view_of(source))

    def memory(self) -> tuple[int, int]:
        """Return free and total bytes that this process may use."""
        free, total, _ = limits.memory()
        return free, total

    def _free_for_weights(self) -> int:
        """Bytes that pages of mapped weights may take: free memory minus buffers that are allocated and soon
        touched.
        """
        with self._counting:
            soon = sum(buffer.size for buffer in self._allocated)
        return limits.memory().free - soon

    def __del__(self) -> None:
        if hasattr(self, "team"):
            self.team.close()

    def close(self) -> None:
        """Stop the threads."""
        self.team.close()
        self.read_ahead.close()
        self._programs.clear()


def _columns(graph: Graph) -> int:
    """Columns of the widest product with a weight, which is the number of tokens of the batch; without such a product,
    the most rows of any operation.
    """
    products = [(node.nrows, node.source(0)) for node in graph.nodes if node.op is Op.MUL_MAT]
    wide = [n for n, w in products if w is not None and w.ne[2] * w.ne[3] == 1]
    return max(wide or [node.nrows for node in graph.nodes if not node.is_noop], default=0)
