"""Kernels as the card launches them.

A kernel is written in the SIMD language (`devices/kernels`, groups of threads) or in the SIMT language
(`devices/cuda/kernels`, threads). An `Image` is the code that a driver loads.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from llamado.devices.compile.program import Operation
from llamado.devices.cuda import lanes, teams
from llamado.devices.cuda.simt import Trace
from llamado.devices.kernel import Kernel


class SimtKernel(Kernel):
    """A kernel of the SIMT language: `trace(code, arguments, **parameters)`."""


def kernel(*fields: str) -> Callable[[Trace], SimtKernel]:
    """Make a kernel of the SIMT language."""

    def wrap(trace: Trace) -> SimtKernel:
        return SimtKernel(trace.__name__, fields, trace)

    return wrap


class Shape(NamedTuple):
    """The threads of a launch."""

    grid: tuple[int, int]
    threads: int
    """Threads of a block."""
    shared_bytes: int = 0
    """Shared memory of a block."""
    chained: bool = False
    """True if the kernel waits itself for the one before it, and so may begin early."""


@dataclass(kw_only=True)
class ShapedOperation(Operation):
    """An operation with a shape of its own. Other operations run in groups, as many as the device has."""

    shape: Shape


class Image(NamedTuple):
    """Code of a kernel, and the bytes of stack that each group of threads needs."""

    code: bytes
    stack_bytes: int

    def packed(self) -> bytes:
        """Return the image as it is stored on disk."""
        return _STACK_BYTES.pack(self.stack_bytes) + self.code

    @staticmethod
    def unpacked(data: bytes) -> Image:
        """The opposite of `packed`."""
        return Image(data[_STACK_BYTES.size :], *_STACK_BYTES.unpack_from(data))


_STACK_BYTES = struct.Struct("<q")


class Images(Protocol):
    """Makes images for one kind of driver."""

    @property
    def stored(self) -> bool:
        """True if images are valid in other processes, and so are cached on disk."""

    @property
    def identity(self) -> str:
        """Everything that determines the compiled images besides sources, kernel and parameters."""

    def trace(self, kernel: Kernel, parameters: Mapping[str, Any], symbol: str, threads: int) -> Image:
        """Return what `compile` takes of a kernel for blocks of `threads`. Called from one thread at a time."""

    def compile(self, image: Image) -> Image:
        """Return the image that the card loads. Called from several threads. Raises `CudaError`."""


def simt_trace(kernel: Kernel, stack: list[int]) -> tuple[tuple[str, ...], Trace]:
    """Return the fields and the SIMT trace of a kernel of either language. Tracing adds its stack bytes to `stack`."""
    if isinstance(kernel, SimtKernel):
        return kernel.fields, kernel.trace
    trace_of: Any = teams.trace_of if isinstance(kernel, teams.TeamKernel) else lanes.trace_of
    made: tuple[tuple[str, ...], Trace] = trace_of(kernel, lambda code: stack.append(code.stack_bytes))
    return made
