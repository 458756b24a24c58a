"""The command-r architecture: Command R, Command R+, Aya 23."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import RopeMode
from llamado.models.decoder import Layer, ParallelDecoder
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads
from llamado.models.parts.feedforward import GatedFeedForward
from llamado.models.parts.norms import LayerNorm, Norm, take_head_norm
from llamado.models.weights import RoleWeights


class CommandRModel(ParallelDecoder):
    """Parallel attention and feed-forward network after one layer norm; no biases.

    The largest model has layer norms of queries and keys, with separate weights per head.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        eps = "attention.layer_norm_epsilon"
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL, norm_eps=eps)
        return replace(hp, logit_scale=keys.float_("logit_scale", 0.0) or 1.0)

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n, biased=False)

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        return Layer(
            attn_norm=LayerNorm.take(w, "attn_norm", hp.n_embd, biased=False),
            attention=Attention(
                matrices=AttentionMatrices.take(w, hp, layer),
                q_norm=take_head_norm(w, "attn_q_norm", heads.dim_k, heads.n),
                k_norm=take_head_norm(w, "attn_k_norm", heads.dim_k, heads.n_kv),
                rope=hp.rope,
                scale=hp.attention_scale,
            ),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, hp.n_ff[layer]),
        )
