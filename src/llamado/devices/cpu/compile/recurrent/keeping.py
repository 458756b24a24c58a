"""States that go into a memory's rows as they are made, instead of being copied there.

What makes states leaves them behind its other results; SET_ROWS, right behind it, puts them where the next batch finds
them. A sequence's state may be written while others are still read, so of a graph it is asked that no sequence writes
a row that another one reads, which llamado's own never do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from llamado.devices.cpu.compile import checks
from llamado.devices.cpu.compile.emitter import Emitter, Fields, nothing
from llamado.devices.cpu.compile.program import ByteSpan
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType


class Made(NamedTuple):
    """Where an operation leaves states in its result: from byte `offset` on, `size` bytes for each sequence."""

    offset: int
    size: int


class Keeping(NamedTuple):
    """What keeps states: fields of the kernel that makes them, and what it reads and writes more."""

    fields: Fields
    ids: str
    """The type of the numbers of rows; "" where states go nowhere."""
    reads: list[ByteSpan]
    writes: list[ByteSpan]


NOTHING = Keeping({"kept": nothing(), "kept1": 0, "kept_rows": 0, "kept_ids": nothing()}, "", [], [])
"""Nobody keeps them."""


def keep(
    out: Emitter,
    node: Tensor,
    states: Made,
    nodes: Sequence[Tensor],
    numbers: Mapping[Tensor, int],
    readers: Sequence[Tensor],
) -> Keeping:
    """The SET_ROWS that does nothing but keep the states that a node makes, done with it.

    `nodes` are those of the graph, `numbers` their places, `readers` what reads the node, also through views.
    """
    found = [reader for reader in readers if _end(reader, node) > states.offset]
    if len(found) == 1 and node in numbers and _keeps(found[0], node, states):
        (last,) = found
        between = nodes[numbers[node] + 1 : numbers.get(last, 0)]
        if numbers.get(last, -1) > numbers[node] and all(other.is_noop for other in between):
            ids = last.src[1]
            assert ids is not None
            checks.check_node(last, out.extent)
            out.did(last)
            fields: Fields = {
                "kept": out.place(last), "kept1": last.nb[1], "kept_rows": last.ne[1], "kept_ids": out.place(ids)
            }  # fmt: skip
            return Keeping(fields, ids.type.name, [out.span(ids)], [out.span(last)])
    return NOTHING


def _end(reader: Tensor, node: Tensor) -> int:
    """How far into the result of a node an operation reads."""
    ends = []
    for source in reader.src:
        if source is not None and source.root()[0] is node:
            steps = sum((n - 1) * nb for n, nb in zip(source.ne[1:], source.nb[1:], strict=True))
            ends.append(source.root()[1] + steps + source.ne[0] * source.nb[0])
    return max(ends, default=0)


def _keeps(reader: Tensor, node: Tensor, made: Made) -> bool:
    """Whether an operation puts all states of a node, one behind the other, into rows of a memory."""
    if reader.op is not Op.SET_ROWS or node.root()[0] is not node:
        return False
    states, ids = reader.src[0], reader.src[1]
    return (
        states is not None
        and ids is not None
        and states.root() == (node, made.offset)
        and states.type is TensorType.F32
        and states.is_contiguous()
        and states.nbytes == node.nbytes - made.offset
        and (4 * states.ne[0], *states.ne[2:]) == (made.size, 1, 1)
        and reader.type is TensorType.F32
        and reader.has_contiguous_rows()
        and ids.nb[0] == ids.type.block_bytes
        and reader.root()[0].op is Op.NONE
    )
