"""Ternary weights −1, 0 and 1 times a scale: TQ1_0, five per byte, and TQ2_0, four per byte (ggml-quants.c)."""

from __future__ import annotations

import numpy as np

from llamado.quantize.types.arithmetic import Bytes, Floats, blocks, halves, inverse, round_away


def tq1_0(x: Floats, _: Floats | None) -> Bytes:
    d, trits = _trits(x)
    n = len(trits)
    parts = [trits[:, :160].reshape(n, 5, 32), trits[:, 160:240].reshape(n, 5, 16), trits[:, 240:].reshape(n, 4, 4)]
    packed = []
    for part in parts:
        q: Bytes = np.zeros((n, part.shape[2]), np.uint8)
        for digit in part.swapaxes(0, 1):
            q = q * 3 + digit
        if part.shape[1] == 4:  # the first digit is the most significant one in all bytes
            q = q * 3
        packed.append(((q.astype(np.uint16) * 256 + 242) // 243).astype(np.uint8))
    return blocks(*packed, halves(d))


def tq2_0(x: Floats, _: Floats | None) -> Bytes:
    d, trits = _trits(x)
    quarters = trits.reshape(-1, 2, 4, 32) & 3
    shifted = quarters << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return blocks(np.bitwise_or.reduce(shifted, axis=2).reshape(-1, 64), halves(d))


def _trits(x: Floats) -> tuple[Floats, Bytes]:
    """Return scales, and −1, 0, 1 as 0, 1, 2."""
    x = x.reshape(-1, 256)
    d = np.abs(x).max(axis=1)
    return d, (round_away(x * inverse(d)[:, None]) + 1).astype(np.uint8)
