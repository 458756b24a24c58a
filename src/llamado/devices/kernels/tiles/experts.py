"""Products of experts that get many columns, with AMX: their columns are copied into tiles, once for all products.

The columns of the chosen expert `number`, whose first slot is `first` in the table of routes, start at group first /
TILE + number: two experts never share a group.
"""

from __future__ import annotations

from types import SimpleNamespace

from llamado.devices.kernel import kernel
from llamado.devices.kernels.activations import BYTES_PER_COLUMN, RUN, TILE
from llamado.devices.kernels.experts import MATRICES, ChosenExpert, chosen_at, slot_and_token
from llamado.devices.kernels.tiles.matmul import Product, units
from llamado.devices.simd import I32, I64, Code, Type, Value, Work
from llamado.gguf.types import TensorType

MANY = 48
"""Columns of an expert from which on tiles are faster, for weights in super-blocks: by a tenth for 64 columns, up to
twice for 256. For blocks of 32 they are hardly faster.
"""


def gathered_bytes(n_experts: int, n_slots: int, column_bytes: int) -> int:
    """Bytes of all columns in tiles, `column_bytes` each."""
    return (n_slots // TILE + min(n_experts, n_slots)) * TILE * column_bytes


def _group(number: Value, found: ChosenExpert) -> Value:
    return found.first // TILE + number


@kernel("x", "x_slot", "x_token", "n_parts", "n_experts", "routes", "tiles")
def gather_tiles(c: Code, a: SimpleNamespace, work: Work, *, block: int) -> None:
    """Copy scattered columns, of `n_parts` blocks, into the tiles of their experts."""
    size, run = BYTES_PER_COLUMN[block], RUN[block]
    bytes_ = Type("i8", run)
    with c.shares(work, c.load(I64, a.routes), c.i64(1)) as number:
        found = chosen_at(c, a, number)
        with c.when(found.n >= MANY), c.range(0, found.n) as column:
            slot, token = slot_and_token(c, found, column)
            source = a.x + slot * a.x_slot + token * a.x_token
            group, j = _group(number, found) + column // TILE, column % TILE
            target = a.tiles + group * a.n_parts * (size * TILE)
            with c.range(0, a.n_parts) as part:
                here, to = source + part * size, target + part * (size * TILE)
                for at in range(0, block, run):
                    c.store(to + (at * TILE) + j * run, c.load(bytes_, here + at))
                for at in range(block, size, 4):
                    c.store(to + (at * TILE) + j * 4, c.load(I32, here + at))


@kernel(*MATRICES, "n_blocks", "n_experts", "routes", "panels")
def experts_tiles(c: Code, a: SimpleNamespace, work: Work, *, weights: str) -> None:
    """y of the experts that get at least MANY columns; x: the columns in tiles."""
    product = Product(c, TensorType[weights])
    n_units = units(a)
    with c.shares(work, c.load(I64, a.routes) * n_units, a.share) as item:
        number = item // n_units
        found = chosen_at(c, a, number)

        def target(row: Value, column: Value) -> Value:
            slot, _ = slot_and_token(c, found, column)
            to: Value = a.y + slot * a.y_stride + row * 4
            return to

        with c.when(found.n >= MANY):
            x = a.x + _group(number, found) * a.n_blocks * (product.column_bytes * TILE)
            matrix = SimpleNamespace(**vars(a) | {"w": a.w + found.expert * a.expert_bytes})
            product.run(matrix, item % n_units, x, found.n, target)
    product.close()
