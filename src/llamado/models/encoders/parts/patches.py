"""Patch embeddings of pictures, and the table of learned positions."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, get_rows, mul_mat, reshape
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.weights import Weights

PATCHES, ORDER = "patches", "order"
"""Names of inputs: the pixels of each patch, and the number of its learned position."""


class PatchEmbedding(NamedTuple):
    """A convolution whose stride is its size, as a matrix: patches arrive as rows of 3 · size² pixels, in the order of
    the weight (color, row, column).
    """

    weight: Tensor
    bias: Tensor | None
    size: int

    @classmethod
    def take(cls, weights: Weights, size: int, n_embd: int, name: str = "v.patch_embd.weight") -> PatchEmbedding:
        """Take the weight of [size, size, 3, n_embd], or [3 · size², n_embd], and the bias, if the file has one.

        Raises InvalidModel.
        """
        w, flat = weights.shared, 3 * size * size
        shape = (flat, n_embd) if weights.has(name) and weights.ne(name)[0] == flat else (size, size, 3, n_embd)
        return cls(w.require(name, *shape), w.optional("v.patch_embd.bias", n_embd), size)

    def __call__(self, step: EncoderPass, n_patches: int) -> Tensor:
        """Return F32 [n_embd, n_patches]."""
        n = 3 * self.size * self.size
        x = mul_mat(
            reshape(self.weight, n, self.weight.nelements // n), step.input(PATCHES, n, n_patches), name="patch_embd"
        )
        return x if self.bias is None else add(x, self.bias, "patch_bias")


def add_positions(step: EncoderPass, x: Tensor, table: Tensor) -> Tensor:
    """Add to each patch the row of a table of positions that the input ORDER names: F32 [n_embd, n_patches]."""
    rows = get_rows(table, step.input(ORDER, x.ne[1], type=TensorType.I32))
    return add(x, rows, "pos_embed")
