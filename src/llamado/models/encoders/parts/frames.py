"""Patch embedding of encoders that also take videos: a patch of two frames, which for a picture are equal."""

from __future__ import annotations

from typing import NamedTuple

from llamado.ggml.graph import add, mul_mat, reshape
from llamado.ggml.tensor import Tensor
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.patches import PATCHES
from llamado.models.weights import Weights


class FramePairEmbedding(NamedTuple):
    """Two convolutions as matrices, one for each frame; see PatchEmbedding."""

    weights: tuple[Tensor, Tensor]
    bias: Tensor | None
    size: int

    @classmethod
    def take(cls, weights: Weights, size: int, n_embd: int) -> FramePairEmbedding:
        """Take the weights, each [size, size, 3, n_embd], and the bias, if the file has one. Raises InvalidModel."""
        w = weights.shared
        first, second = (w.require(f"v.patch_embd.weight{which}", size, size, 3, n_embd) for which in ("", ".1"))
        return cls((first, second), w.optional("v.patch_embd.bias", n_embd), size)

    def __call__(self, step: EncoderPass, n_patches: int) -> Tensor:
        """Return F32 [n_embd, n_patches]."""
        n = 3 * self.size * self.size
        given = step.input(PATCHES, n, n_patches)
        first, second = (mul_mat(reshape(weight, n, weight.ne[3]), given) for weight in self.weights)
        x = add(first, second, "patch_embd")
        return x if self.bias is None else add(x, self.bias, "patch_bias")
