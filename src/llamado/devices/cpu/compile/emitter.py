"""What compiling a graph comes to: operations in order, and the memory they name.

Every family of operations (chains, copies, products, attention …) is written in terms of an Emitter.
"""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from llamado.devices.cpu.compile import checks
from llamado.devices.cpu.compile.program import ByteSpan, Operation, Place, Temporary
from llamado.devices.cpu.jit import Kernel
from llamado.devices.cpu.lowerings.lowering import Lowering
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.device import DeviceError
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor

Fields = dict[str, int | float | Place]


class Emitter:
    """Collects the operations of a graph. Temporaries are placed later (program.py)."""

    def __init__(self, graph: Graph, lowering: Lowering, n_threads: int) -> None:
        self.lowering, self.n_threads = lowering, n_threads
        self.operations: list[Operation] = []
        self.constants: list[NDArray[Any]] = []  # kept alive as long as the program
        self.places: dict[Tensor, Temporary] = {}
        self.scratch = Temporary(0)
        self.outputs = {t.root()[0] for t in graph.outputs.values()}
        self.done: set[Tensor] = set()
        self.waiting: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """Rows that the operation which needs them chooses itself: by their GET_ROWS the table and the numbers."""
        self.subject: Tensor | None = None
        """What an error is about."""
        self.made: dict[tuple[Any, ...], Temporary] = {}
        """What several operations share (rotation angles, ranges of masks, quantised columns), by what it is made of:
        see `contents`.
        """
        self._scratch_step = 0
        self._changes: dict[Tensor, int] = {}  # how often memory was written in place

    # --- places ----------------------------------------------------------------------------------------------------
    def place(self, tensor: Tensor, offset: int = 0) -> Place:
        """Where a tensor's first byte is."""
        root, inside = (tensor, 0) if tensor.view_src is None else tensor.root()
        buffer = root.buffer
        if buffer is not None:
            if not isinstance(buffer, CpuBuffer):
                raise DeviceError(f"tensor {root.name or '?'} lies on another device")
            start, size = root.offset + inside, checks.extent(tensor)
            if start < 0 or start + size > buffer.size:
                raise DeviceError(
                    f"tensor {tensor.name or root.name or '?'} ends at byte {start + size} of a buffer of {buffer.size}"
                )
            return Place(None, buffer.address + start + offset)
        if root.op is Op.NONE:
            raise DeviceError(f"tensor {root.name or '?'} has no memory: bind it before the graph runs")
        whole = checks.extent(root)
        if inside < 0 or inside + checks.extent(tensor) > whole:
            raise DeviceError(f"tensor {tensor.name or '?'} lies outside tensor {root.name or '?'}")
        temporary = self.places.get(root)
        if temporary is None:
            temporary = self.places[root] = Temporary(whole, keep=root in self.outputs)
        return Place(temporary, inside + offset)

    def span(self, tensor: Tensor) -> ByteSpan:
        """The bytes of a tensor."""
        return ByteSpan(self.place(tensor), checks.extent(tensor))

    def constant(self, values: NDArray[Any]) -> Place:
        """Numbers that are there before the graph runs."""
        self.constants.append(values)
        return Place(None, values.ctypes.data)

    def share_scratch(self, size: int) -> Fields:
        """Fields of per-thread scratch. Its threads never meet, so it counts as nobody's read or write."""
        size = -(-size // 64) * 64
        self._scratch_step = max(self._scratch_step, size)
        return {"scratch": Place(self.scratch, 0), "scratch_step": size}

    def contents(self, tensor: Tensor) -> tuple[Any, ...]:
        """A key for what a tensor's bytes are now: where, in which shape, after how many writes in place."""
        root, inside = tensor.root()
        return root, inside, tensor.ne, tensor.nb, self._changes.get(root, 0)

    # --- operations ------------------------------------------------------------------------------------------------
    def emit(
        self, kernel: Kernel, parameters: dict[str, Any], fields: Fields, reads: list[ByteSpan], writes: list[ByteSpan],
        label: str = "",
    ) -> None:  # fmt: skip
        """Appends an operation."""
        self.operations.append(Operation(kernel, parameters, fields, reads, writes, label=label))

    def did(self, node: Tensor) -> None:
        """A node's operation is there."""
        self.done.add(node)
        if node.view_src is not None:
            root = node.root()[0]
            self._changes[root] = self._changes.get(root, 0) + 1

    def finish(self) -> list[Operation]:
        """All operations; nothing comes after this."""
        if self._scratch_step:
            # one step for all: a thread that is ahead must not meet another's scratch of the operation before
            for operation in self.operations:
                if "scratch_step" in operation.fields:
                    operation.fields["scratch_step"] = self._scratch_step
            self.scratch.size = self._scratch_step * self.n_threads
        return self.operations


def nothing() -> Place:
    """Where an operand would be that an operation does not have."""
    return Place(None, 0)
