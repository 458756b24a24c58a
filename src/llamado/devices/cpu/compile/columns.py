"""Quantised columns (`kernels/activations.py`): made once for all products that use them, best by the chain that
computes the activations.
"""

from __future__ import annotations

from typing import Any

from llamado.devices.cpu.compile.chains import Chain
from llamado.devices.cpu.compile.emitter import Emitter
from llamado.devices.cpu.compile.program import ByteSpan, Place, Temporary
from llamado.devices.cpu.kernels.activations import quantized_bytes
from llamado.devices.cpu.kernels.formats import FORMATS
from llamado.devices.cpu.kernels.formats.format import Blocks
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType


def takes_blocks(product: Tensor) -> bool:
    """Whether a product takes its weights as the file has them: one matrix in blocks, of eight rows or more."""
    w, x = product.source(0), product.source(1)
    if w is None or x is None or not isinstance(FORMATS.get(w.type), Blocks):
        return False
    if w.ne[0] != x.ne[0] or w.ne[0] % w.type.block_size:
        return False
    return w.ne[1] >= 8 and w.ne[2] == 1 == w.ne[3] and product.type == TensorType.F32 and product.is_contiguous()


def takes_columns(product: Tensor, x: Tensor) -> bool:
    """Whether `product` multiplies weights in blocks with `x` itself, row for column."""
    return product.op is Op.MUL_MAT and product.source(1) is x and x.is_contiguous() and takes_blocks(product)


def block_of(product: Tensor) -> int:
    """Weights of a block: what decides the layout of columns."""
    weights = product.src[0]
    assert weights is not None
    return weights.type.block_size


def quantize(chain: Chain, x: Tensor, block: int) -> None:
    """Appends the stage that quantises the chain's rows, those of `x`."""
    out, columns = chain.out, x.nrows
    target = Temporary(quantized_bytes(block, x.ne[0], columns, out.lowering.columns))
    out.made[_key(out, x, block)] = target
    chain.add(("quantize", block), "quantize", x=Place(target, 0), columns=columns)
    chain.writes.append(ByteSpan(Place(target, 0), target.size))


def activations(out: Emitter, x: Tensor, block: int) -> Temporary:
    """Quantised columns of x, made here unless the chain that computed x has."""
    key = _key(out, x, block)
    if key not in out.made:
        chain = Chain(out, x)
        chain.operand(("row",), x, x, "row")
        quantize(chain, x, block)
        chain.finish(x)
    return out.made[key]


def _key(out: Emitter, x: Tensor, block: int) -> tuple[Any, ...]:
    """For the columns of contiguous x: its further dimensions may be cut as they like."""
    root, inside, *_, changes = out.contents(x)
    return "columns", root, inside, x.ne[0], x.nrows, block, changes
