"""Storing of new states directly in memory rows, without a copy.

An operation leaves new states behind its other results; a SET_ROWS directly after it stores them where the next batch
reads them. A sequence's state may be written while others are still read, so a graph must not let one sequence write a
row that another one reads. llamado's own graphs never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llamado.devices.compile import checks
from llamado.devices.compile.emitter import Emitter, Fields, no_operand
from llamado.devices.compile.program import ByteSpan
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType


class StateLocation(NamedTuple):
    """Location of the states in an operation's result: from byte `offset` on, `size` bytes for each sequence."""

    offset: int
    size: int


class StateTarget(NamedTuple):
    """The target of new states: fields of the kernel that produces them, and its additional reads and writes."""

    fields: Fields
    ids: str
    """The type of the row numbers; "" if the states stay in the result."""
    reads: list[ByteSpan]
    writes: list[ByteSpan]


NO_TARGET = StateTarget({"kept": no_operand(), "kept1": 0, "kept_rows": 0, "kept_ids": no_operand()}, "", [], [])
"""The states stay in the result."""


def fuse_state_store(
    out: Emitter,
    node: Tensor,
    states: StateLocation,
    nodes: Sequence[Tensor],
    numbers: Mapping[Tensor, int],
    readers: Sequence[Tensor],
) -> StateTarget:
    """Fuse the SET_ROWS that only stores a node's states into the node, if there is one.

    `nodes` are those of the graph, `numbers` their positions, `readers` the operations that read the node, also through
    views.
    """
    found = [reader for reader in readers if _end(reader, node) > states.offset]
    if len(found) == 1 and node in numbers and _stores_states(found[0], node, states):
        (last,) = found
        between = nodes[numbers[node] + 1 : numbers.get(last, 0)]
        if numbers.get(last, -1) > numbers[node] and all(other.is_noop for other in between):
            ids = last.src[1]
            assert ids is not None
            checks.check_node(last, out.extent)
            out.mark_done(last)
            fields: Fields = {
                "kept": out.place(last), "kept1": last.nb[1], "kept_rows": last.ne[1], "kept_ids": out.place(ids)
            }  # fmt: skip
            return StateTarget(fields, ids.type.name, [out.span(ids)], [out.span(last)])
    return NO_TARGET


def _end(reader: Tensor, node: Tensor) -> int:
    """End of the part of a node's result that an operation reads, in bytes."""
    ends = []
    for source in reader.src:
        if source is not None and source.root()[0] is node:
            steps = sum((n - 1) * nb for n, nb in zip(source.ne[1:], source.nb[1:], strict=True))
            ends.append(source.root()[1] + steps + source.ne[0] * source.nb[0])
    return max(ends, default=0)


def _stores_states(reader: Tensor, node: Tensor, location: StateLocation) -> bool:
    """Return True if an operation stores all states of a node, consecutively, in rows of a memory."""
    if reader.op is not Op.SET_ROWS or node.root()[0] is not node:
        return False
    states, ids = reader.src[0], reader.src[1]
    return (
        states is not None
        and ids is not None
        and states.root() == (node, location.offset)
        and states.type is TensorType.F32
        and states.is_contiguous()
        and states.nbytes == node.nbytes - location.offset
        and (4 * states.ne[0], *states.ne[2:]) == (location.size, 1, 1)
        and reader.type is TensorType.F32
        and reader.has_contiguous_rows()
        and ids.nb[0] == ids.type.block_bytes
        and reader.root()[0].op is Op.NONE
    )
