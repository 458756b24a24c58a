"""The mpt architecture: MPT 7B, 30B."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add, get_rows
from llamado.ggml.tensor import Tensor
from llamado.models.decoder import LayerNormDecoder
from llamado.models.forward import Pass
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import GELU
from llamado.models.weights import Weights


class MptModel(LayerNormDecoder):
    """Layer norms, GELU networks, and learned positions or ALiBi, depending on the file."""

    has_norm_bias = None
    has_rope = False
    feed_forward = GELU

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return replace(
            super()._read_hparams(keys, n_vocab),
            clamp_kqv=keys.float_("attention.clamp_kqv", 0.0),
            max_alibi_bias=keys.float_("attention.max_alibi_bias", 0.0),
        )

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._positions = weights.input.optional("position_embd.weight", hp.n_embd, hp.n_ctx_train)
        super()._take_weights(weights)

    def _embed(self, step: Pass) -> Tensor:
        x = super()._embed(step)
        return x if self._positions is None else add(x, get_rows(self._positions, step.positions()), "inp_embd")
