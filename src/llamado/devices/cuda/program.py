"""Programs of a card: planned operations as launches, with constants and stacks in the card's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llamado.devices.compile.program import Constant, Operation, Place, Temporary
from llamado.devices.cuda.graphs import Launch
from llamado.devices.cuda.jit import CudaJit, LoadedKernel, Variant
from llamado.devices.cuda.kernel import Shape, ShapedOperation, SimtKernel
from llamado.devices.cuda.lanes import GROUP

BLOCK_THREADS = 128
"""Threads of a block of a kernel in groups."""


@dataclass
class LoadedOperation:
    """An operation with its kernel on the card."""

    operation: Operation
    shape: Shape
    kernel: LoadedKernel

    @property
    def stack_size(self) -> int:
        """Bytes of stack of all groups."""
        n_blocks = self.shape.grid[0] * self.shape.grid[1]
        return self.kernel.stack_bytes * (n_blocks * self.shape.threads // GROUP)


def load(operations: Sequence[Operation], jit: CudaJit, n_groups: int) -> list[LoadedOperation]:
    """Load the kernels of operations. Those in groups get `n_groups` groups. Raises NoKernelsLeft."""
    in_groups = Shape((n_groups * GROUP // BLOCK_THREADS, 1), BLOCK_THREADS)
    shapes = [one.shape if isinstance(one, ShapedOperation) else in_groups for one in operations]
    kernels = jit.load(
        [
            Variant(operation.kernel, operation.parameters, shape.threads, shape.shared_bytes)
            for operation, shape in zip(operations, shapes, strict=True)
        ]
    )
    return [LoadedOperation(*one) for one in zip(operations, shapes, kernels, strict=True)]


def link(loaded: Sequence[LoadedOperation], arena: int, stack: int, constants: Mapping[Constant, int]) -> list[Launch]:
    """Return the launches of operations whose temporaries are in an arena at address `arena`. `stack`: address of the
    stacks; `constants`: addresses of the constants.
    """

    def address(place: Place) -> int:
        base, offset = place
        if base is None:
            return offset
        return offset + (arena + base.offset if isinstance(base, Temporary) else constants[base])

    records = []
    for operation, shape, kernel in ((one.operation, one.shape, one.kernel) for one in loaded):
        values = operation.kernel.pack(operation.fields, address)
        if not isinstance(operation.kernel, SimtKernel):
            values += [stack, kernel.stack_bytes]
        records.append(Launch(kernel.function, shape.grid, tuple(values), shape.chained))
    return records
