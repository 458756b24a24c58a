"""The plamo3 architecture: PLaMo 3."""

from __future__ import annotations

from dataclasses import replace

from llamado.models.architectures.qwen.qwen3 import Qwen3Model
from llamado.models.decoder import Layer
from llamado.models.hparams import (
    HyperParameters,
    read_swa_layers,
)
from llamado.models.keys import Keys
from llamado.models.parts.feedforward import FeedForward, FusedGatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights


class Plamo3Model(Qwen3Model):
    """Qwen3 with post-norms of both blocks, and a sliding window in seven of eight layers."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        n_swa = keys.int_("attention.sliding_window", 0)
        if not n_swa:
            return hp
        rope_swa = replace(hp.rope, freq_base=keys.float_("rope.freq_base_swa", 10000.0), freq_scale=1.0)
        return replace(hp, n_swa=n_swa, swa_layers=read_swa_layers(keys, hp.n_layer, 8), rope_swa=rope_swa)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        n_embd = self.hparams.n_embd
        # These names have no `.weight` suffix.
        norms = (RmsNorm(w.require(name, n_embd)) for name in ("post_attention_norm", "post_ffw_norm"))
        return super()._take_layer(w, layer)._replace(attn_post_norm=next(norms), ffn_post_norm=next(norms))

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        return FusedGatedFeedForward.take(w, self.hparams.n_embd, self.hparams.n_ff[layer])
