"""The gpt-oss architecture: gpt-oss 20B and 120B."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import GluOp, RopeMode
from llamado.models.decoder import POST_ATTENTION_NORM_BEFORE_FFN, Decoder
from llamado.models.hparams import Gating, HyperParameters, RouterKind, inverse_sqrt, swa_rope, with_window
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention
from llamado.models.parts.feedforward import FeedForwardKind
from llamado.models.weights import RoleWeights


class GptOssModel(Decoder):
    """Sliding window in every other layer, attention sinks, and experts with biases (arXiv 2508.10925)."""

    rope_mode = RopeMode.NEOX
    norms = POST_ATTENTION_NORM_BEFORE_FFN
    feed_forward = FeedForwardKind(GluOp.SWIGLU_OAI)
    router = RouterKind(Gating.SOFTMAX_WEIGHT)

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        hp = super()._read_hparams(keys, n_vocab)
        hp = with_window(keys, hp, 2, rope=swa_rope(keys, hp.rope))
        return replace(hp, attention_scale=inverse_sqrt(hp.rope.n_dims))

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        sinks = w.require("attn_sinks.weight", self.hparams.n_head[layer])
        return replace(super()._take_attention(w, layer), sinks=sinks)
