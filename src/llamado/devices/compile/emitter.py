"""The emitter collects the operations of a graph in order, and the memory they use. The target is their device.

Every family of operations (chains, copies, products, attention …) is compiled through an Emitter.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from llamado.devices.compile import checks
from llamado.devices.compile.program import ByteSpan, Constant, Operation, Place, Temporary
from llamado.devices.device import DeviceError
from llamado.devices.kernel import Kernel
from llamado.devices.lowering import Lowering
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor

Fields = dict[str, int | float | Place]


class AddressedBuffer(Protocol):
    """A buffer of a device whose kernels take addresses."""

    size: int
    address: int


@dataclass(frozen=True)
class Target:
    """The properties of a device that its operations depend on."""

    name: str
    """Name of the device in errors."""
    lowering: Lowering
    n_threads: int
    buffers: type[AddressedBuffer]
    """The class of its buffers."""
    aligned: bool = False
    """True if it cannot read elements from addresses that are not multiples of their size."""


class MemoryAccess(NamedTuple):
    """Memory an operation touches: bytes `start` to `stop` of a tensor without a place yet (`base`), or absolute
    addresses.

    `layout` describes the location of each row; None if unknown. If it is the same for two accesses, row i of one is
    row i of the other.
    """

    base: Tensor | None
    start: int
    stop: int
    write: bool
    layout: tuple[int, ...] | None = None

    def conflicts(self, other: MemoryAccess) -> bool:
        """Return True if one of the two writes memory that the other touches."""
        return (
            (self.write or other.write)
            and self.base is other.base
            and self.start < other.stop
            and other.start < self.stop
        )


class Emitter:
    """Collects the operations of a graph. Temporaries are placed later (program.py)."""

    def __init__(self, graph: Graph, target: Target) -> None:
        self.lowering, self.n_threads = target.lowering, target.n_threads
        self.device, self._buffers, self._aligned = target.name, target.buffers, target.aligned
        self.operations: list[Operation] = []
        self.constants: list[Constant] = []
        self.places: dict[Tensor, Temporary] = {}
        self.scratch = Temporary(0)
        self.outputs = {t.root()[0] for t in graph.outputs.values()}
        self.done: set[Tensor] = set()
        self.deferred: dict[Tensor, tuple[Tensor, Tensor]] = {}
        """Rows that the operation which needs them selects itself: GET_ROWS node → table and row numbers."""
        self.subject: Tensor | None = None
        """The node that an error refers to."""
        self.shared: dict[tuple[Any, ...], Temporary] = {}
        """Results shared by several operations (rotation angles, mask ranges, quantized columns), by a key of their
        sources: see `contents_key`.
        """
        self._scratch_step = 0
        self._changes: dict[Tensor, int] = {}  # number of in-place writes to memory
        # caches of properties that do not change during compilation
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
        """Return the address of a tensor's first byte, or of the one at `offset`."""
        place = self.span(tensor).place
        return Place(place.base, place.offset + offset) if offset else place

    def span(self, tensor: Tensor) -> ByteSpan:
        """Return the bytes of a tensor."""
        span = self._spans.get(tensor)
        if span is None:
            span = self._spans[tensor] = ByteSpan(self._find(tensor), self.extent(tensor))
        return span

    def _find(self, tensor: Tensor) -> Place:
        root, inside = (tensor, 0) if tensor.view_src is None else tensor.root()
        if self._aligned and not checks.is_aligned(tensor, root.offset + inside):
            raise DeviceError(f"tensor {tensor.name or root.name or '?'} is not aligned to its elements")
        buffer = root.buffer
        if buffer is not None:
            if not isinstance(buffer, self._buffers):
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
        """Return the read access to a tensor, which need not have a place yet."""
        access = self._accesses.get(tensor)
        if access is None:
            root, start = tensor.root()
            base: Tensor | None = root
            if isinstance(root.buffer, self._buffers):
                base, start = None, root.buffer.address + root.offset + start
            access = self._accesses[tensor] = MemoryAccess(base, start, start + self.extent(tensor), write=False)
        return access

    def touched(self, node: Tensor) -> list[MemoryAccess]:
        """Return an operation's accesses; the first is the write."""
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
        """Return True if one of some operations writes memory of the tensors."""
        mine = [self.access(tensor) for tensor in tensors]
        return any(self.touched(node)[0].conflicts(each) for node in nodes if not node.is_noop for each in mine)

    def can_write_early(self, tensor: Tensor, others: Iterable[Tensor], nodes: Iterable[Tensor]) -> bool:
        """Return True if a tensor can be written before some operations, because they do not touch it and it does not
        overlap others.
        """
        mine = self.touched(tensor)[0]
        theirs = [self.access(other) for other in others]
        theirs += [access for node in nodes if not node.is_noop for access in self.touched(node)]
        return not any(mine.conflicts(access) for access in theirs)

    def constant(self, values: NDArray[Any]) -> Place:
        """Add numbers that exist before the graph runs."""
        constant = Constant(values)
        self.constants.append(constant)
        return Place(constant, 0)

    def share_scratch(self, size: int) -> Fields:
        """Return the fields of per-thread scratch. Threads never share it, so it counts as neither read nor written."""
        size = -(-size // 64) * 64
        self._scratch_step = max(self._scratch_step, size)
        return {"scratch": Place(self.scratch, 0), "scratch_step": size}

    def contents_key(self, tensor: Tensor) -> tuple[Any, ...]:
        """Cache key for a tensor's current bytes: address, shape, and number of in-place writes."""
        root, inside = tensor.root()
        return root, inside, tensor.ne, tensor.nb, self._changes.get(root, 0)

    # --- operations ------------------------------------------------------------------------------------------------
    def emit(
        self, kernel: Kernel, parameters: dict[str, Any], fields: Fields, reads: list[ByteSpan], writes: list[ByteSpan],
        label: str = "",
    ) -> None:  # fmt: skip
        """Append an operation."""
        self.operations.append(Operation(kernel, parameters, fields, reads, writes, label=label))

    def mark_done(self, node: Tensor) -> None:
        """Mark a node as done."""
        self.done.add(node)
        if node.view_src is not None:
            root = node.root()[0]
            self._changes[root] = self._changes.get(root, 0) + 1

    def finish(self) -> list[Operation]:
        """Return all operations. Call this last."""
        if self._scratch_step:
            # one step for all operations: a thread that is ahead must not touch another's scratch of the operation
            # before
            for operation in self.operations:
                if "scratch_step" in operation.fields:
                    operation.fields["scratch_step"] = self._scratch_step
            self.scratch.size = self._scratch_step * self.n_threads
        return self.operations


def no_operand() -> Place:
    """Placeholder for an operand that an operation does not have."""
    return Place(None, 0)
