"""Compilation of matrix products for a card: launches of `cuda/kernels`, in shapes that fill it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from llamado.devices.compile import columns, experts
from llamado.devices.compile.compiler import OperationEmitters
from llamado.devices.compile.emitter import Emitter, Fields
from llamado.devices.compile.products import Products
from llamado.devices.compile.program import ByteSpan, Place, Temporary
from llamado.devices.cuda.driver import CardProperties
from llamado.devices.cuda.kernel import Shape, ShapedOperation, SimtKernel
from llamado.devices.cuda.kernels.experts import experts_few, experts_many
from llamado.devices.cuda.kernels.few import FewTile, alignment, matmul_few
from llamado.devices.cuda.kernels.floats import FloatTile, matmul_float
from llamado.devices.cuda.kernels.many import ManyTile, matmul_many
from llamado.devices.cuda.kernels.terms import unit_bytes
from llamado.devices.cuda.panel import WIDEST
from llamado.devices.cuda.simt import WARP
from llamado.devices.device import DeviceError
from llamado.devices.kernels.activations import UNIT, units_bytes
from llamado.devices.kernels.experts import routes
from llamado.devices.kernels.formats import in_blocks
from llamado.devices.kernels.formats.format import Blocks32
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor

_FEW_32, _FEW_256 = 4, 8
"""Most columns of a product without tensor cores: blocks of 32 have eight terms for each term of a super-block."""
_WARPS = 4
_WARPS_OF_PROCESSOR = 16
"""Warps that a processor needs so that some of them compute while others wait for memory."""
_TILES = ((4, 64, 2), (4, 32, 2), (4, 16, 3), (2, 32, 3), (2, 16, 4), (2, 8, 4))
"""Warps, columns and stages of tiles for tensor cores, preferred ones first."""
_LARGE_SHARED = 160 << 10
_MOST_BLOCKS = 65535
"""Most blocks in the second direction of a grid."""


def card_products(card: CardProperties, out: Emitter) -> OperationEmitters:
    """Return the emitters of products of one graph on a card."""
    products = CardProducts(out, card)
    return {
        Op.MUL_MAT: products.emit,
        Op.MUL_MAT_ID: partial(experts.multiply, out, blocks=products.expert_blocks),
    }


class CardProducts(Products):
    """Compiles the products of a graph for a card."""

    def __init__(self, out: Emitter, card: CardProperties) -> None:
        super().__init__(out)
        self._card = card
        # two blocks for a processor, unless their tiles would be small
        self._most_shared = card.shared_bytes // (2 if card.shared_bytes >= _LARGE_SHARED else 1)

    # --- weights in blocks -------------------------------------------------------------------------------------------
    def _blocks(self, node: Tensor, w: Tensor, x: Tensor) -> None:
        out, step = self._out, units_bytes(w.ne[0])
        acts = columns.activations(out, x, columns.layout_of(node, out.lowering))
        each, fields, reads = x.nrows // w.ne[2], self._shape(node, w, acts), self._reads(w, acts)
        if w.ne[2] > 1:  # experts whose routes are known
            fields |= {"expert_bytes": w.nb[2], "x_slot": step, "x_token": 0}
            if each == 1:
                ids = out.constant(np.arange(w.ne[2], dtype=np.int32))
                fields |= {"ids": ids, "id0": 4, "id1": 0, "n_used": w.ne[2], "n_experts": w.ne[2]}
                self._experts_few(node, w, fields, reads)
            else:
                fields |= {"n_experts": w.ne[2], "routes": out.constant(routes(w.ne[2], each))}
                self._experts_many(node, w, fields, reads, each)
            return
        fields |= {"x_step": step}
        if each <= (_FEW_32 if isinstance(in_blocks(w.type), Blocks32) else _FEW_256):
            root = w.root()[0]
            written = root.op is not Op.NONE or out.contents_key(w)[-1]
            tile = replace(self._few_tile(w, each), chained=not written)
            grid = -(-w.ne[1] // (tile.rows * tile.warps)), 1
            self._emit(matmul_few, tile, grid, node, w, fields, reads)
        else:
            many = self._many_tile(w, each)
            grid = -(-w.ne[1] // many.rows), -(-each // many.columns)
            self._emit(matmul_many, many, grid, node, w, fields | {"n_columns": each}, reads)

    def expert_blocks(self, out: Emitter, node: Tensor, w: Tensor, x: Tensor, ids: Tensor) -> None:
        """Emit a product of experts in blocks."""
        step = units_bytes(w.ne[0])
        acts = columns.activations(out, x, columns.layout_of(node, out.lowering))
        fields, reads = self._shape(node, w, acts), self._reads(w, acts)
        # one column serves all slots of its token, or each slot has its own
        fields |= {"expert_bytes": w.nb[2], "x_slot": 0 if x.ne[1] == 1 else step, "x_token": step * (x.ne[1] == 1)}
        if ids.nelements <= max(w.ne[2], ids.ne[0]):
            self._experts_few(node, w, fields | experts.choices(out, ids, w.ne[2]), [*reads, out.span(ids)])
        else:
            fields |= experts.routed(out, ids, w.ne[2], reads)
            self._experts_many(node, w, fields, reads, -(-ids.nelements // w.ne[2]))

    def _experts_few(self, node: Tensor, w: Tensor, fields: Fields, reads: Sequence[ByteSpan]) -> None:
        tile = self._few_tile(w, 1, node.nrows)
        grid = -(-w.ne[1] // (tile.rows * tile.warps)), node.nrows
        self._emit(experts_few, tile, grid, node, w, fields, reads)

    def _experts_many(self, node: Tensor, w: Tensor, fields: Fields, reads: Sequence[ByteSpan], each: int) -> None:
        """`each`: columns of a matrix on average."""
        matrices = min(w.ne[2], node.nrows)
        tile = self._many_tile(w, each, matrices)
        grid = -(-w.ne[1] // tile.rows), matrices
        self._emit(experts_many, tile, grid, node, w, fields, reads)

    def _shape(self, node: Tensor, w: Tensor, acts: Temporary) -> Fields:
        """Fields of all products of weights in blocks."""
        return {
            "w": self._out.place(w), "row_bytes": w.nb[1], "n_rows": w.ne[1], "n_units": -(-w.ne[0] // UNIT),
            "n_parts": w.ne[0] // 32, "x": Place(acts, 0), "y": self._out.place(node), "y_step": node.nb[1],
        }  # fmt: skip

    def _reads(self, w: Tensor, acts: Temporary) -> list[ByteSpan]:
        return [self._out.span(w), ByteSpan(Place(acts, 0), acts.size)]

    def _emit(
        self, kernel: SimtKernel, tile: FewTile | ManyTile | FloatTile, grid: tuple[int, int], node: Tensor, w: Tensor,
        fields: Fields, reads: Sequence[ByteSpan],
    ) -> None:  # fmt: skip
        if grid[1] > _MOST_BLOCKS:
            raise DeviceError(f"a product of {grid[1]} matrices, or tiles of columns, is not supported here")
        chained = isinstance(tile, FewTile) and tile.chained
        shape = Shape(grid, tile.threads, tile.shared_bytes, chained)
        operation = ShapedOperation(
            kernel, {"tile": tile}, fields, list(reads), [self._out.span(node)], label=f"{w.type.name} {w.name}",
            shape=shape,
        )  # fmt: skip
        self._out.operations.append(operation)

    def _few_tile(self, w: Tensor, n: int, matrices: int = 1) -> FewTile:
        """Return the tile of a product with n columns: as many rows for each warp as leave warps enough, and at most
        half of a processor's shared memory.
        """
        n_units = -(-w.ne[0] // UNIT)
        least = min(WARP, max(2, WARP // (1 << (n_units - 1).bit_length())))  # no lane without a unit
        wanted = max(1, _WARPS_OF_PROCESSOR // n) * self._card.processors
        most = 8 if n <= 2 else WARP

        def tile(rows: int, warps: int = _WARPS) -> FewTile:
            stages = 1 if n_units <= WARP // rows else 2
            return FewTile(w.type.name, n, rows, warps, stages, self._align(w), w.ne[0] % UNIT > 0)

        found = tile(least)
        while found.rows < most and matrices * w.ne[1] // (2 * found.rows) >= wanted:
            found = tile(2 * found.rows)
        while found.shared_bytes > self._card.shared_bytes // 2 and found.rows < WARP:
            found = tile(2 * found.rows)
        while found.shared_bytes > self._card.shared_bytes // 2 and found.warps > 1:
            found = tile(found.rows, found.warps // 2)
        return found

    def _many_tile(self, w: Tensor, n: int, matrices: int = 1) -> ManyTile:
        """Return the tile of a product with n columns of each matrix: the greatest one that has no more columns than
        needed, leaves room for a second block if shared memory is large, and gives each processor a block.
        """
        tiles = [ManyTile(w.type.name, *size, self._align(w), w.ne[0] % UNIT > 0) for size in _TILES]
        fitting = [tile for tile in tiles if tile.shared_bytes <= self._most_shared] or tiles[-1:]
        fitting = [tile for tile in fitting if tile.columns < 2 * n] or fitting[-1:]

        def blocks(tile: ManyTile) -> int:
            return -(-w.ne[1] // tile.rows) * -(-n // tile.columns) * matrices

        full = (tile for tile in fitting if blocks(tile) >= self._card.processors)
        return next(full, max(fitting, key=blocks))

    def _align(self, w: Tensor) -> int:
        """A power of two that divides the addresses of all units of a weight."""
        base, offset = self._out.place(w)
        address = offset if base is None else offset % WIDEST
        return alignment(address, w.nb[1], w.nb[2] if w.ne[2] > 1 else 0, unit_bytes(in_blocks(w.type)))

    # --- plain floats ------------------------------------------------------------------------------------------------
    def _floats(self, node: Tensor, w: Tensor, x: Tensor) -> None:
        n = x.ne[1]
        few = FloatTile(w.type.name, 1, n, 8, 1, 256, 4 if n <= 4 else 2)
        tile = few if n <= 8 else FloatTile(w.type.name, 4, 8, 8, 4, 64, 2)
        grid = -(-w.ne[1] // tile.block_rows), -(-n // tile.block_columns) * x.ne[2] * x.ne[3]
        if not w.ne[0] or grid[1] > _MOST_BLOCKS or tile.shared_bytes > self._card.shared_bytes:
            super()._floats(node, w, x)
            return
        if not (self._in_pieces(w) and self._in_pieces(x)):
            super()._floats(node, w, x)
            return
        fields = self._float_fields(node, w, x)
        self._emit(matmul_float, tile, grid, node, w, fields, [self._out.span(w), self._out.span(x)])

    def _in_pieces(self, tensor: Tensor) -> bool:
        """Return True if all rows begin at multiples of 16 bytes."""
        strides = [nb for ne, nb in zip(tensor.ne[1:], tensor.nb[1:], strict=True) if ne > 1]
        return alignment(self._out.place(tensor).offset, *strides) == WIDEST
