"""States that are read where they lie in a memory, instead of being copied from there first.

GET_ROWS chooses the states that sequences go on from. What changes states finds their rows as well, if it alone wants
them; see `keeping.py` for where they go, and what is asked of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamado.devices.cpu.compile.emitter import Emitter, Fields, nothing
from llamado.devices.cpu.compile.program import ByteSpan
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType


class Reading(NamedTuple):
    """Where states are: fields of the kernel that changes them, whether it chooses rows, and what it reads."""

    fields: Fields
    chosen: bool
    reads: list[ByteSpan]


def waits(out: Emitter, node: Tensor, reader: Tensor, between: Sequence[Tensor]) -> bool:
    """Whether a GET_ROWS can be left to `reader`, which has its result, whole, as its last source.

    `between`: the nodes of the graph in between.
    """
    table, ids, states = node.src[0], node.src[1], reader.src[-1]
    assert table is not None and ids is not None
    return (
        states is not None
        and states.root() == (node, 0)
        and states.is_contiguous()
        and states.nelements == node.nelements
        and node.view_src is None
        and node.buffer is None
        and node not in out.outputs
        and table.type is TensorType.F32
        and table.has_contiguous_rows()
        and table.root()[0].op is Op.NONE
        and ids.nb[0] == 4
        and node.ne[2:] == (1, 1)
        and not out.is_written((table, ids), between)
    )


def read(out: Emitter, states: Tensor, size: int) -> Reading:
    """Where the states of an operation are, `size` bytes for each sequence: one behind the other, or left to it."""
    chosen = out.waiting.get(states.root()[0])
    if chosen is None:
        fields: Fields = {"state": out.place(states), "state_row": size, "ids": nothing(), "n_states": 0}
        return Reading(fields, False, [out.span(states)])
    table, ids = chosen
    fields = {"state": out.place(table), "state_row": table.nb[1], "ids": out.place(ids), "n_states": table.ne[1]}
    return Reading(fields, True, [out.span(table), out.span(ids)])
