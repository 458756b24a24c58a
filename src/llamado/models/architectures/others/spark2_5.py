"""The spark2_5 architecture: Spark 2.5."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import GluOp, RopeMode
from llamado.models.decoder import Decoder
from llamado.models.hparams import (
    HyperParameters,
    read_swa_layers,
    rope_dims,
    swa_rope,
)
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, Heads, OutputGate
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.weights import RoleWeights


class Spark25Model(Decoder):
    """Gated heads, GEGLU networks, and window layers that may rotate another fraction of each head."""

    rope_mode = RopeMode.NEOX

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n = rope_dims(keys, "rope.dimension_count_swa", hp.rope.n_dims, hp.head_dim_k)
        return replace(
            hp,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer, 0),
            rope_swa=replace(swa_rope(keys, hp.rope), n_dims=n),
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp = self.hparams
        return replace(super()._take_attention(w, layer), gate=OutputGate.take(w, hp.n_embd, Heads.of(hp, layer)))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return GatedFeedForward.take(w, self.hparams.n_embd, self.hparams.n_ff[layer], GluOp.GEGLU)
