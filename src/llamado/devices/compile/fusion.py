"""Fusion rules: a row operation may join a chain if it continues with the chain's row, its other sources are ready, and
it touches no other row.

A thread of a chain may be at any row while another is at any other; and an operation that joins a chain runs before the
operations between them in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llamado.devices.compile import checks
from llamado.devices.compile.chains import row_strides
from llamado.devices.compile.checks import BINARY
from llamado.devices.compile.emitter import Emitter, MemoryAccess
from llamado.devices.compile.stages import STAGES
from llamado.ggml.ops import VIEW_OPS, Op
from llamado.ggml.tensor import Tensor

_FAR = 256
"""Operations that a chain looks ahead for its next stage."""


class Fusion:
    """Finds the operations that may join the chain that begins at one node of a graph."""

    def __init__(self, out: Emitter, nodes: Sequence[Tensor], numbers: Mapping[Tensor, int], first: Tensor) -> None:
        """`numbers`: positions of nodes in the graph."""
        self._out, self._nodes, self._numbers = out, nodes, numbers
        self._at = numbers.get(first, 0)
        self._touched: list[MemoryAccess] = []
        self._new: list[Tensor] = []  # nodes of the chain whose accesses are not collected yet

    def joined(self, node: Tensor) -> None:
        """Record that `node` joined the chain."""
        self._new.append(node)

    def next(self, node: Tensor, consumers: Sequence[Tensor]) -> Tensor | None:
        """Return the consumer that can join after `node`, the chain's last operation."""
        for reader in consumers:
            if reader in self._out.done or reader.op not in STAGES or reader.op is Op.GET_ROWS:
                continue
            if self._numbers[reader] > self._at + _FAR or not checks.is_row_operation(reader):
                continue
            if (
                _takes_over(reader, node)
                and all(s is None or s is node or self._is_ready(s, node) for s in reader.src)
                and self._keeps_to_rows(reader)
                and self._may_come_early(reader)
            ):
                self._out.subject = reader
                checks.check_node(reader, self._out.extent)
                return reader
        return None

    def _is_ready(self, tensor: Tensor, node: Tensor) -> bool:
        """Return True if a tensor is computed already, or is `node` itself in another shape."""
        for _ in range(checks.MAX_VIEWS):
            if tensor.view_src is None or not (tensor.op in VIEW_OPS or tensor.op is Op.NONE):
                return tensor is node or tensor.op is Op.NONE or tensor in self._out.done
            tensor = next((s for s in tensor.src if s is not None), tensor.view_src)
        return False

    def _keeps_to_rows(self, reader: Tensor) -> bool:
        """Return True if a chain with `reader` touches nothing of other rows."""
        for node in self._new:
            self._touched += _row_accesses(self._out, node)
        self._new.clear()
        return not any(
            mine.conflicts(theirs) and (mine.layout is None or mine.layout != theirs.layout)
            for mine in _row_accesses(self._out, reader)
            for theirs in self._touched
        )

    def _may_come_early(self, reader: Tensor) -> bool:
        """Return True if `reader` may run now: no operation in between writes memory it touches, or reads memory it
        writes.
        """
        between = self._nodes[self._at + 1 : self._numbers[reader]]
        others = [node for node in between if node not in self._out.done and not node.is_noop]
        if not others:
            return True
        mine = self._out.touched(reader)
        return not any(access.conflicts(theirs) for node in others for theirs in self._touches(node) for access in mine)

    def _touches(self, node: Tensor) -> list[MemoryAccess]:
        """Return an operation's accesses, including the deferred reads of rows it selects itself."""
        out = self._out
        if not out.deferred:
            return out.touched(node)
        left = [out.deferred.get(s.root()[0], ()) for s in node.src if s is not None]
        return [*out.touched(node), *(out.access(tensor) for tensors in left for tensor in tensors)]


def _takes_over(reader: Tensor, node: Tensor) -> bool:
    """Return True if a row operation works on the row of `node`, element by element."""
    if reader.op is Op.SET_ROWS:
        rows_in = reader.src[0]
        assert rows_in is not None
        if rows_in.root()[0] is not node or rows_in.nelements != node.nelements:
            return False
        if not (rows_in.is_contiguous() and node.is_contiguous() and rows_in.ne[2] == rows_in.ne[3] == 1):
            return False
        if rows_in is not node and (node.ne[0] * node.ne[1] != rows_in.ne[0] or node.ne[3] != 1):
            return False
        return node.ne[0] % reader.type.block_size == 0
    if reader.ne != node.ne or node not in reader.src:
        return False
    if reader.op in BINARY and reader.src[0] is not node:
        # only a sum or a product may take the row as its second operand
        return reader.op in (Op.ADD, Op.MUL) and reader.src[0] is not None and reader.src[0].ne == node.ne
    return reader.src[0] is node


def _row_accesses(out: Emitter, node: Tensor) -> list[MemoryAccess]:
    """Return a row operation's accesses, row by row for those to the chain's own row."""
    chosen = node.op in (Op.SET_ROWS, Op.GET_ROWS)
    written, *_ = out.touched(node)
    found = [written if node.op is Op.SET_ROWS else _in_rows(written, node, node)]
    for i, source in enumerate(node.src):
        if source is None or (node.op is Op.SET_ROWS and i == 0):
            continue  # the rows that a cache takes are in registers
        access = out.access(source)
        aside = chosen or (i > 0 and node.op in (Op.ROPE, Op.SOFT_MAX, Op.ADD_ID))
        found.append(access if aside else _in_rows(access, source, node))
    return found


def _in_rows(access: MemoryAccess, tensor: Tensor, like: Tensor) -> MemoryAccess:
    """Return the access to a tensor with one row for each row of `like`."""
    base, start, stop, write, _ = access
    (_, n1, n2, n3), (s1, s2, s3) = like.ne, row_strides(tensor, like)
    layout = start, tensor.ne[0], s1 if n1 > 1 else 0, s2 if n2 > 1 else 0, s3 if n3 > 1 else 0
    return MemoryAccess(base, start, stop, write, layout)
