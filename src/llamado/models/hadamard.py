"""Turning keys and values before they are quantised: a Walsh-Hadamard matrix spreads what is large in one element of a
head over all of them, so that less is lost to the scale of a block.

The matrix is orthogonal and its own inverse: products of turned queries and turned keys are those of the plain ones,
and turning a mean of turned values gives that of the plain ones. Which caches it is for: `llama_kv_cache` in
llama-kv-cache.cpp.
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


def turned_keys(type: TensorType, heads: Collection[int]) -> int:
    """How many elements are turned together in keys of this type and of heads of these sizes; 0: none.

    It is the greatest power of two that divides the size of a head, if all have one size.
    """
    n = _turned(type, heads)
    while n and max(heads) % (2 * n) == 0:
        n *= 2
    return n


def turned_values(type: TensorType, heads: Collection[int]) -> int:
    """As `turned_keys`, for values: the fewest."""
    return _turned(type, heads)


def _turned(type: TensorType, heads: Collection[int]) -> int:
    quantised = type.block_size > 1
    return _LEAST if quantised and len(heads) == 1 and all(n and n % _LEAST == 0 for n in heads) else 0


class Hadamard(Constant):
    """F32 [n, n]: the Walsh-Hadamard matrix whose rows have length one; n is a power of two."""

    def __init__(self, n: int) -> None:
        super().__init__(f"hadamard_{n}", TensorType.F32, n, n)

    def fill(self, batch: Batch) -> Bytes:
        """See Input."""
        return hadamard(self.ne[0])


@cache
def hadamard(n: int) -> Bytes:
    """The bytes of the matrix."""
    matrix = np.array([[1.0 / np.sqrt(np.float32(n))]], np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    matrix.flags.writeable = False
    return matrix.reshape(-1).view(np.uint8)


def turn(matrix: Tensor, x: Tensor) -> Tensor:
    """Each `matrix.ne[0]` elements of x, turned together."""
    n = matrix.ne[0]
    rows = reshape(x if x.is_contiguous() else cont(x), n, x.nelements // n)
    return reshape(mul_mat(matrix, rows, hint=MatrixHint.HADAMARD), *x.ne)
