"""Validation of external bytes before they are restored into a memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from llamado.gguf.types import TensorType
from llamado.models.memory.storage import Bytes, RowSpan

_HUGE_BF16 = 0x7149  # 1e30: products of a cache element with a query element remain float32 up to there
_SCALES = {
    TensorType.Q4_0: 1,
    TensorType.Q4_1: 2,
    TensorType.Q5_0: 1,
    TensorType.Q5_1: 2,
    TensorType.Q8_0: 1,
    TensorType.IQ4_NL: 1,
}
"""Leading f16 numbers of a block: its scale, and in some types its minimum."""


def cut(data: Bytes, spans: Sequence[RowSpan]) -> list[Bytes]:
    """Split the concatenated bytes of spans."""
    pieces, at = [], 0
    for span in spans:
        size = span.n * span.tensor.nb[1]
        pieces.append(data[at : at + size])
        at += size
    return pieces


def are_valid(data: Bytes, spans: Sequence[RowSpan]) -> bool:
    """Return True if the bytes have the size of these rows, are finite, and are small enough that no sum overflows."""
    if data.size != sum(span.n * span.tensor.nb[1] for span in spans):
        return False
    return all(_is_valid(piece, span.tensor.type) for piece, span in zip(cut(data, spans), spans, strict=True))


def _is_valid(data: Bytes, type: TensorType) -> bool:
    """Return True if all numbers of this type are finite, and far from overflowing in products."""
    match type:
        case TensorType.F16:
            return not bool(np.any((data.view(np.uint16) & 0x7C00) == 0x7C00))
        case _ if type in _SCALES:
            scales = data.reshape(-1, type.block_bytes)[:, : 2 * _SCALES[type]].copy().view(np.uint16)
            return not bool(np.any((scales & 0x7C00) == 0x7C00))
        case TensorType.BF16:
            return not bool(np.any((data.view(np.uint16) & 0x7FFF) >= _HUGE_BF16))
        case TensorType.F32:
            return not bool(np.any((data.view(np.uint32) & 0x7FFF_FFFF) >= _HUGE_BF16 << 16))
        case _:
            raise NotImplementedError(f"caches of {type.name}")
