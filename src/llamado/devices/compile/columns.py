"""Quantized columns (`kernels/activations.py`): computed once for all products that use them, preferably by the chain
that computes the activations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llamado.devices.compile.chains import Chain
from llamado.devices.compile.emitter import Emitter
from llamado.devices.compile.program import ByteSpan, Place, Temporary
from llamado.devices.kernels.activations import TILE, quantized_bytes, units_bytes
from llamado.devices.kernels.formats import FORMATS, in_blocks
from llamado.devices.kernels.formats.format import Blocks
from llamado.devices.lowering import Lowering
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType

FILL_TILES = 48
"""Columns from which on tiles are faster, if the lowering has them: unpacking for them takes longer."""


class ColumnLayout(NamedTuple):
    """Layout of columns: blocks of `block` numbers, with columns in "groups", each "apart" or in "units", or in
    "tiles".
    """

    block: int
    place: str


def takes_blocks(product: Tensor) -> bool:
    """Return True if a product takes its weights in the file's layout: in blocks, matrices of eight rows or more.

    That is one matrix, one for each head, or for products of experts one for each expert.
    """
    w, x = product.source(0), product.source(1)
    if w is None or x is None or not isinstance(FORMATS.get(w.type), Blocks):
        return False
    if w.ne[0] != x.ne[0] or w.ne[0] % w.type.block_size or not w.has_contiguous_rows():
        return False
    if w.ne[1] < 8 or w.ne[3] != 1 or product.type != TensorType.F32 or not product.is_contiguous():
        return False
    if product.op is Op.MUL_MAT_ID:
        return x.ne[1] in (1, product.ne[1])
    return w.ne[2] == 1 or (x.ne[3] == 1 and x.ne[2] % w.ne[2] == 0)


def takes_columns(product: Tensor, x: Tensor) -> bool:
    """Return True if `product` multiplies weights in blocks with `x` itself, row for column."""
    if product.op not in (Op.MUL_MAT, Op.MUL_MAT_ID) or not x.is_contiguous() or not takes_blocks(product):
        return False
    taken = product.src[1]
    assert taken is not None
    if taken is x:
        return True
    same = taken.root() == x.root() and taken.nelements == x.nelements and taken.ne[0] == x.ne[0]
    return same and taken.is_contiguous()


def layout_of(product: Tensor, lowering: Lowering) -> ColumnLayout:
    """Return the layout of the columns that a product takes."""
    weights, x = product.src[0], product.src[1]
    assert weights is not None and x is not None
    place = "groups"
    if lowering.units:
        place = "units"
    elif product.op is Op.MUL_MAT_ID or weights.ne[2] > 1:
        place = "apart" if x.nrows > 1 else place
    elif lowering.tiles and x.nrows >= FILL_TILES and weights.ne[1] >= TILE:
        place = "tiles"
    return ColumnLayout(in_blocks(weights.type).columns, place)


def quantize(chain: Chain, x: Tensor, layout: ColumnLayout) -> None:
    """Append the stage that quantizes the chain's rows, those of `x`."""
    out, columns = chain.out, x.nrows
    if layout.place == "units":
        size = units_bytes(x.ne[0]) * columns
    else:
        group = {"groups": out.lowering.columns, "apart": 1, "tiles": TILE}[layout.place]
        size = quantized_bytes(layout.block, x.ne[0], columns, group)
    target = Temporary(size)
    out.shared[_key(out, x, layout)] = target
    chain.add(("quantize", *layout), "quantize", x=Place(target, 0), columns=columns)
    chain.writes.append(ByteSpan(Place(target, 0), target.size))


def activations(out: Emitter, x: Tensor, layout: ColumnLayout) -> Temporary:
    """Return the quantized columns of x, computed here unless the chain that computed x did it."""
    key = _key(out, x, layout)
    if key not in out.shared:
        chain = Chain(out, x)
        chain.operand(("row",), x, x, "row")
        quantize(chain, x, layout)
        chain.finish(x)
    return out.shared[key]


def _key(out: Emitter, x: Tensor, layout: ColumnLayout) -> tuple[Any, ...]:
    """Cache key for the columns of contiguous x, independent of the shape of its further dimensions."""
    root, inside, *_, changes = out.contents_key(x)
    return "columns", root, inside, x.ne[0], x.nrows, layout, changes
