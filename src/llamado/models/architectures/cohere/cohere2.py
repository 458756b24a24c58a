"""The cohere2 architecture: Command R7B, Command A."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Layer, ParallelDecoder
from llamado.models.hparams import HyperParameters, read_hparams, read_swa_layers
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.weights import RoleWeights


class Cohere2Model(ParallelDecoder):
    """Parallel attention and feed-forward network after one layer norm without biases (arXiv 2504.00698).

    Of four layers, three have sliding-window attention with rotary positions, the last has full attention without
    positions.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        eps = "attention.layer_norm_epsilon"
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, norm_eps=eps)
        return replace(
            hp,
            logit_scale=keys.float_("logit_scale") or 1.0,
            n_swa=keys.int_("attention.sliding_window"),
            swa_layers=read_swa_layers(keys, hp.n_layer, 4),
        )

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n, biased=False)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp = self.hparams
        return Layer(
            attn_norm=LayerNorm.take(w, "attn_norm", hp.n_embd, biased=False),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                rope=hp.rope if hp.is_swa(layer) else None,
                scale=hp.attention_scale,
            ),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer]),
        )
