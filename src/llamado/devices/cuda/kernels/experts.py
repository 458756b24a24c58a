"""Products of experts with quantized weights: the kernels of `few.py` and `many.py` with a matrix for each slot.

Slots, the table of routes and the fields are those of `devices/kernels/experts.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.cuda.kernel import kernel
from llamado.devices.cuda.kernels.few import FewRows, FewTile
from llamado.devices.cuda.kernels.many import ManyTile, tile_of
from llamado.devices.cuda.simt import Register, SimtCode
from llamado.devices.kernels.experts import CHOSEN_BYTES, HEAD, SLOT_BYTES
from llamado.devices.simd import I32, I64

MATRICES = ("w", "expert_bytes", "row_bytes", "n_rows", "n_units", "n_parts", "x", "x_slot", "x_token", "y", "y_step")


@kernel(*MATRICES, "ids", "id0", "id1", "n_used", "n_experts")
def experts_few(c: SimtCode, a: SimpleNamespace, *, tile: FewTile) -> None:
    """y for few slots, one for each block y: each reads the rows of its expert."""
    slot = c.block("y").to(I64)
    token = slot // a.n_used
    id_ = c.load(I32, a.ids + token * a.id1 + slot % a.n_used * a.id0).to(I64)
    expert = c.select((id_ >= 0) & (id_ < a.n_experts), id_, c.i64(0))
    x, y = a.x + slot * a.x_slot + token * a.x_token, a.y + slot * a.y_step
    FewRows(c, tile, a).multiply(a.w + expert * a.expert_bytes, [x], [y])


@kernel(*MATRICES, "n_experts", "routes")
def experts_many(c: SimtCode, a: SimpleNamespace, *, tile: ManyTile) -> None:
    """y for any number of slots: block y has the expert of this number in the table of routes, with all its slots."""
    number = c.block("y").to(I64)
    with c.when(number < c.load(I64, a.routes)):
        chosen = a.routes + HEAD + number * CHOSEN_BYTES
        expert, start, count = (c.load(I32, chosen + 4 * i) for i in range(3))
        order = a.routes + HEAD + a.n_experts * CHOSEN_BYTES + start.to(I64) * SLOT_BYTES
        work = tile_of(c, tile, a)
        with c.range(0, count, tile.columns) as first:

            def column(inside: Register, first: Register = first) -> tuple[Register, Register]:
                at = order + (first + inside).to(I64) * SLOT_BYTES
                slot, token = c.load(I32, at).to(I64), c.load(I32, at + 4).to(I64)
                return a.x + slot * a.x_slot + token * a.x_token, a.y + slot * a.y_step

            work.multiply(a.w + expert.to(I64) * a.expert_bytes, column, count - first)
