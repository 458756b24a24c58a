"""Hadamard rotation of keys and values before quantization.

A Walsh-Hadamard matrix spreads a large element over the whole head, so that the scale of a block loses less precision.
The matrix is orthogonal and its own inverse: products of rotated queries and keys equal those of the plain ones, and
rotating a weighted mean of rotated values gives that of the plain ones. The caches it applies to are those of
`llama_kv_cache` in llama-kv-cache.cpp.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

import numpy as np

from llamado.ggml.graph import cont, mul_mat, reshape
from llamado.ggml.ops import MatrixHint
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.batch import Batch
from llamado.models.inputs import Bytes, Constant

_LEAST = 64


def key_rotation(type: TensorType, heads: Collection[int]) -> int:
    """Return how many elements of a key are rotated together, for this type and these head sizes; 0: no rotation.

    This is the greatest power of two that divides the head size, if all heads have the same size.
    """
    n = _rotation_size(type, heads)
    while n and max(heads) % (2 * n) == 0:
        n *= 2
    return n


def value_rotation(type: TensorType, heads: Collection[int]) -> int:
    """Return how many elements of a value are rotated together: the smallest allowed size, or 0."""
    return _rotation_size(type, heads)


def _rotation_size(type: TensorType, heads: Collection[int]) -> int:
    quantized = type.block_size > 1
    return _LEAST if quantized and len(heads) == 1 and all(n and n % _LEAST == 0 for n in heads) else 0


class Hadamard(Constant):
    """F32 [n, n]: the orthonormal Walsh-Hadamard matrix; n is a power of two."""

    def __init__(self, n: int) -> None:
        super().__init__(f"hadamard_{n}", TensorType.F32, n, n)

    def fill(self, batch: Batch) -> Bytes:
        return hadamard(self.ne[0])


@cache
def hadamard(n: int) -> Bytes:
    """Return the bytes of the matrix."""
    matrix = np.array([[1.0 / np.sqrt(np.float32(n))]], np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix.flags.writeable = False
    return matrix.reshape(-1).view(np.uint8)


def rotate_heads(matrix: Tensor, x: Tensor) -> Tensor:
    """Rotate each group of `matrix.ne[0]` elements of x."""
    n = matrix.ne[0]
    rows = reshape(x if x.is_contiguous() else cont(x), n, x.nelements // n)
    return reshape(mul_mat(matrix, rows, hint=MatrixHint.HADAMARD), *x.ne)
