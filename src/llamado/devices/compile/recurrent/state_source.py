"""Reading of states directly from memory rows, without a copy.

GET_ROWS selects the states that sequences continue from. The operation that updates states can select the rows itself
if it is the only reader. See `state_target.py` for the target of the states, and the requirement on graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llamado.devices.compile.emitter import Emitter, Fields, no_operand
from llamado.devices.compile.program import ByteSpan
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType


class StateSource(NamedTuple):
    """The source of states: fields of the kernel that updates them, True if it selects rows, and its reads."""

    fields: Fields
    chosen: bool
    reads: list[ByteSpan]


def can_defer_rows(out: Emitter, node: Tensor, reader: Tensor, between: Sequence[Tensor]) -> bool:
    """Return True if a GET_ROWS can be left to `reader`, whose last source is its whole result.

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


def state_source(out: Emitter, states: Tensor, size: int) -> StateSource:
    """Return the source of an operation's states, `size` bytes for each sequence: consecutive, or selected by the
    operation.
    """
    chosen = out.deferred.get(states.root()[0])
    if chosen is None:
        fields: Fields = {"state": out.place(states), "state_row": size, "ids": no_operand(), "n_states": 0}
        return StateSource(fields, False, [out.span(states)])
    table, ids = chosen
    fields = {"state": out.place(table), "state_row": table.nb[1], "ids": out.place(ids), "n_states": table.ne[1]}
    return StateSource(fields, True, [out.span(table), out.span(ids)])
