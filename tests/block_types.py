"""Bytes of weights in blocks, of any type ggml has, and the numbers they stand for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from bits import normal
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from llamado.gguf.types import TensorType as T

Array = NDArray[Any]

SCALES: dict[T, tuple[int, ...]] = {
    T.Q4_0: (0,),
    T.Q4_1: (0, 2),
    T.Q5_0: (0,),
    T.Q5_1: (0, 2),
    T.Q8_0: (0,),
    T.Q2_K: (80, 82),
    T.Q3_K: (108,),
    T.Q4_K: (0, 2),
    T.Q5_K: (0, 2),
    T.Q6_K: (208,),
    T.IQ4_NL: (0,),
    T.IQ4_XS: (0,),
    T.TQ1_0: (52,),
    T.TQ2_0: (64,),
    T.Q1_0: (0,),
    T.Q2_0: (0,),
    T.IQ1_S: (0,),
    T.IQ2_XXS: (0,),
    T.IQ2_XS: (0,),
    T.IQ2_S: (0,),
    T.IQ3_XXS: (0,),
    T.IQ3_S: (0,),
    T.IQ1_M: (48, 50, 52, 54),
}
"""Byte offsets of the f16 scales in a block: d, then dmin or m. In IQ1_M the high four bits of each word make up d."""
CODES = {T.MXFP4: 1, T.NVFP4: 4}
"""Bytes at the beginning of a block that each are a scale."""

_CENTRED = {T.Q2_K: 1.5, T.Q4_K: 7.5, T.Q5_K: 15.5}
"""The dmin / d that centers values of random bytes at 0."""


def decode(data: Array, type: T) -> NDArray[np.float32]:
    """Weights from rows of bytes (..., row bytes): gguf-py's, where it knows the type."""
    own = _OWN.get(type)
    if own is None:
        return dequantize(np.ascontiguousarray(data), GGMLQuantizationType(int(type)))
    blocks = data.reshape(-1, type.block_bytes)
    d = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    return (d * own(blocks[:, 2:])).reshape(*data.shape[:-1], -1)


def _bits(packed: Array) -> Array:
    return np.unpackbits(packed, axis=1, bitorder="little").astype(np.float32) * 2 - 1


def _pairs(packed: Array) -> Array:
    shifted = packed[:, :, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return shifted.reshape(len(packed), -1).astype(np.float32) - 1


_OWN: dict[T, Callable[[Array], Array]] = {T.Q1_0: _bits, T.Q2_0: _pairs}
"""Types that gguf-py does not read (dequantize_row_q1_0, dequantize_row_q2_0 in ggml-quants.c), by what follows d."""


def encode(rng: np.random.Generator, type: T, rows: int, ne0: int, std: float) -> NDArray[Any]:
    """A random weight [ne0, rows] of a type whose values have deviation `std` or nearly so."""
    if ne0 % type.block_size:
        raise ValueError(f"rows of {ne0} weights are not whole {type.name} blocks")
    if type == T.Q8_K:  # of activations: no file should have it
        return rng.integers(0, 256, (rows, type.row_bytes(ne0)), np.uint8)
    if type.name.endswith(("_0", "_1", "F16", "F32")) and type not in (T.TQ1_0, T.TQ2_0, *_OWN):
        values = (normal(rng, (rows, ne0)) * std).astype(np.float32)
        return values if type == T.F32 else quantize(values, GGMLQuantizationType(int(type)))
    return random_blocks(rng, type, rows * ne0 // type.block_size, std).reshape(rows, -1)


def random_blocks(rng: np.random.Generator, type: T, n: int, std: float) -> NDArray[np.uint8]:
    """`n` blocks of random bytes, with scales such that the values have deviation `std` or nearly so."""
    data = rng.integers(0, 256, (n, type.block_bytes), np.uint8)
    if type in CODES:
        data[:, : CODES[type]] = _codes(rng, type, n, std)
        return data

    def set_scales(d: NDArray[np.float32]) -> None:
        if type == T.IQ1_M:
            quarters = d.astype(np.float16).view(np.uint16)[:, None] >> np.array([0, 4, 8, 12], np.uint16) & 15
            data[:, 49::2] = data[:, 49::2] & 15 | (quarters << 4).astype(np.uint8)
            return
        for at, ratio in zip(SCALES.get(type, (0,)), (1.0, _CENTRED.get(type, 0.0)), strict=False):
            data[:, at : at + 2] = (d * ratio).astype(np.float16).view(np.uint8).reshape(-1, 2)

    ones = np.ones(n, np.float32)
    set_scales(ones)
    unit = float(np.float16(decode(data[:64], type).std()))  # whatever order its sum was in
    set_scales(ones * (std / unit) * rng.uniform(0.5, 1.5, n).astype(np.float32))
    return data


def _codes(rng: np.random.Generator, type: T, n: int, std: float) -> NDArray[np.uint8]:
    """Scales of one byte: the codes nearest to what makes E2M1 numbers (of deviation 5.4, doubled) have `std`."""
    wanted = std / 5.4 * rng.uniform(0.5, 1.5, (n, CODES[type]))
    one = np.zeros((127, type.block_bytes), np.uint8)
    one[:, : CODES[type]] = np.arange(127)[:, None]
    one[:, CODES[type] :] = 1  # E2M1's first number, 1 when doubled
    return (
        np.abs(decode(one, type)[:, :1] - wanted.reshape(1, -1)).argmin(axis=0).reshape(wanted.shape).astype(np.uint8)
    )
