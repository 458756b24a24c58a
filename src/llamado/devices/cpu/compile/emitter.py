"""What compiling a graph comes to: operations in order, and the memory they name.

Every family of operations (chains, copies, products, attention …) is written in terms of an Emitter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

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


class MemoryAccess(NamedTuple):
    """Memory an operation touches: bytes `start` to `stop` of a tensor without a place yet (`base`), or absolute ones.

    `layout` says where each row lies, None where that is not known: the same for two accesses means that row i of one
    is row i of the other.
    """

    base: Tensor | None
    start: int
    stop: int
    write: bool
    layout: tuple[int, ...] | None = None

    def meets(self, other: MemoryAccess) -> bool:
        """Whether one of the two writes what the other touches."""
        return (
            (self.write or other.write)
            and self.base is other.base
            and self.start < other.stop
            and other.start < self.stop
        )


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
        # What does not change while the graph is compiled is asked for again and again.
        self._extents: dict[Tensor, int] = {}
        self._spans: dict[Tensor, ByteSpan] = {}
        self._accesses: dict[Tensor, MemoryAccess] = {}
        self._touched: dict[Tensor, list[MemoryAccess]] = {}

    # --- places ----------------------------------------------------------------------------------------------------
    def extent(self, tensor: Tensor) -> int:
        """Bytes from a tensor's first element to the end of its last: `checks.extent`."""
        size = self._extents.get(tensor)
        if size is None:
            size = self._extents[tensor] = checks.extent(tensor)
        return size

    def place(self, tensor: Tensor, offset: int = 0) -> Place:
        """Where a tensor's first byte is, or the one at `offset`."""
        place = self.span(tensor).place
        return Place(place.base, place.offset + offset) if offset else place

    def span(self, tensor: Tensor) -> ByteSpan:
        """The bytes of a tensor."""
        span = self._spans.get(tensor)
        if span is None:
            span = self._spans[tensor] = ByteSpan(self._find(tensor), self.extent(tensor))
        return span

    def _find(self, tensor: Tensor) -> Place:
        root, inside = (tensor, 0) if tensor.view_src is None else tensor.root()
        buffer = root.buffer
        if buffer is not None:
            if not isinstance(buffer, CpuBuffer):
                raise DeviceError(f"tensor {root.name or '?'} lies on another device")
            start, size = root.offset + inside, self.extent(tensor)
            if start < 0 or start + size > buffer.size:
                raise DeviceError(
                    f"tensor {tensor.name or root.name or '?'} ends at byte {start + size} of a buffer of {buffer.size}"
                )
            return Place(None, buffer.address + start)
        if root.op is Op.NONE:
            raise DeviceError(f"tensor {root.name or '?'} has no memory: bind it before the graph runs")
        whole = self.extent(root)
        if inside < 0 or inside + self.extent(tensor) > whole:
            raise DeviceError(f"tensor {tensor.name or '?'} lies outside tensor {root.name or '?'}")
        temporary = self.places.get(root)
        if temporary is None:
            temporary = self.places[root] = Temporary(whole, keep=root in self.outputs)
        return Place(temporary, inside)

    def access(self, tensor: Tensor) -> MemoryAccess:
        """Reading a tensor, which need not have a place yet."""
        access = self._accesses.get(tensor)
        if access is None:
            root, start = tensor.root()
            base: Tensor | None = root
            if isinstance(root.buffer, CpuBuffer):
                base, start = None, root.buffer.address + root.offset + start
            access = self._accesses[tensor] = MemoryAccess(base, start, start + self.extent(tensor), write=False)
        return access

    def touched(self, node: Tensor) -> list[MemoryAccess]:
        """What an operation touches; the first is what it writes."""
        touched = self._touched.get(node)
        if touched is None:
            base, start, stop, *_ = self.access(node)
            touched = [
                MemoryAccess(base, start, stop, write=True),
                *(self.access(s) for s in node.src if s is not None),
            ]
            self._touched[node] = touched
        return touched

    def is_written(self, tensors: Iterable[Tensor], nodes: Iterable[Tensor]) -> bool:
        """Whether one of some operations writes where tensors lie."""
        mine = [self.access(tensor) for tensor in tensors]
        return any(self.touched(node)[0].meets(each) for node in nodes if not node.is_noop for each in mine)

    def may_be_written(self, tensor: Tensor, others: Iterable[Tensor], nodes: Iterable[Tensor]) -> bool:
        """Whether a tensor can be written before some operations, which touch nothing of it, and lies apart from
        others.
        """
        mine = self.touched(tensor)[0]
        theirs = [self.access(other) for other in others]
        theirs += [access for node in nodes if not node.is_noop for access in self.touched(node)]
        return not any(mine.meets(access) for access in theirs)

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
