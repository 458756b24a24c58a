"""The bloom architecture: BLOOM, BLOOMZ."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.tensor import Tensor
from llamado.models.decoder import LayerNormDecoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import GELU
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import Weights


class BloomModel(LayerNormDecoder):
    """Layer norms, of embeddings too; ALiBi; GELU networks (arXiv 2211.05100)."""

    has_rope = False
    feed_forward = GELU

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return replace(super()._read_hparams(keys, n_vocab), max_alibi_bias=8.0)

    def _take_weights(self, weights: Weights) -> None:
        self._embd_norm = LayerNorm.take(weights.input, "token_embd_norm", self.hparams.n_embd)
        super()._take_weights(weights)

    def _embed(self, step: Pass) -> Tensor:
        return self._embd_norm(step, super()._embed(step), "inp_norm")
