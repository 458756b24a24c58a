"""The maple architecture."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import GluOp
from llamado.models.architectures.qwen.qwen3moe import Qwen3MoeModel
from llamado.models.hparams import (
    HyperParameters,
    read_swa_layers,
    swa_rope,
)
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.parts.experts import Mixture
from llamado.models.parts.feedforward import FeedForward
from llamado.models.weights import RoleWeights


class MapleModel(Qwen3MoeModel):
    """Qwen3 MoE with clamped activations; only the sliding-window layers have rotary positions."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        self._limits = keys.floats_per_layer("swiglu_clamp_exp", hp.n_layer)
        return replace(
            hp,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer, 0),
            rope_swa=swa_rope(keys, hp.rope),
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        attention = super()._take_attention(w, layer)
        return attention if self.hparams.is_swa(layer) else replace(attention, rope=None)

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        hp = self.hparams
        assert hp.experts is not None
        return Mixture.take(w, hp.n_embd, hp.experts, GluOp.SWIGLU_CLAMP, limit=self._limits[layer])
