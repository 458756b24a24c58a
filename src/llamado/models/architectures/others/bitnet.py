"""The bitnet architecture: BitNet b1.58."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import Decoder
from llamado.models.forward import Pass, Projection
from llamado.models.parts.attention import Attention
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class NormedProjection(NamedTuple):
    """A norm followed by a projection."""

    norm: RmsNorm
    project: Projection

    def __call__(self, step: Pass, x: Tensor, name: str) -> Tensor:
        return self.project(step, self.norm(step, x, f"{name}_sub_norm"), name)


class BitNetModel(Decoder):
    """Llama with an additional norm before the output matrix of each block (arXiv 2402.17764)."""

    rope_mode = RopeMode.NEOX

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        found = super()._take_attention(w, layer)
        norm, out = RmsNorm.take(w, "attn_sub_norm", self.hparams.n_embd), found.matrices.out
        return replace(found, matrices=found.matrices._replace(out=NormedProjection(norm, out)))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        n_ff = self.hparams.n_ff[layer]
        found, norm = GatedFeedForward.take(w, self.hparams.n_embd, n_ff), RmsNorm.take(w, "ffn_sub_norm", n_ff)
        return found._replace(down=NormedProjection(norm, found.down))
