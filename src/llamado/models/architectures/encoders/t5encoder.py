"""The t5encoder architecture: the encoders of T5, Flan-T5 and T5 v1.1."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import UnaryOp
from llamado.models.decoder import Decoder
from llamado.models.encoder import Encoder
from llamado.models.hparams import HyperParameters
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads, take_projections
from llamado.models.parts.feedforward import GEGLU, FeedForward, FeedForwardKind
from llamado.models.weights import RoleWeights, Weights


class T5EncoderModel(Encoder, Decoder):
    """Pre-norm encoder with relative position biases and unscaled attention scores (arXiv 1910.10683).

    Layers without biases of their own use the first layer's. The feed-forward network is ReLU, or GEGLU in v1.1.
    Attention is causal unless the file disables it, as in llama.cpp.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._n_buckets = keys.int_("attention.relative_buckets_count")
        return replace(super()._read_hparams(keys, n_vocab), attention_scale=1.0)

    def _take_head(self, weights: Weights) -> None:
        hp = self.hparams
        self._output_norm = self._take_norm(weights.output, "enc.output_norm", hp.n_embd)
        weights.output.optional("output.weight", hp.n_embd, hp.n_vocab)  # unused

    def _take_weights(self, weights: Weights) -> None:
        first = weights.layer(0, "enc.blk").require("attn_rel_b.weight", self.hparams.n_head[0], self._n_buckets)
        self._biases = first
        self._layers = [self._take_layer(weights.layer(i, "enc.blk"), i) for i in range(self.hparams.n_layer)]

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        project = take_projections(w, hp.n_embd, heads)
        return Attention(
            matrices=AttentionMatrices(heads, project, w.linear("attn_o", heads.n * heads.dim_v, hp.n_embd)),
            bias=w.optional("attn_rel_b.weight", heads.n, self._n_buckets) or self._biases,
            rope=None,
            scale=hp.attention_scale,
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        kind = GEGLU if w.has("ffn_gate.weight") else FeedForwardKind(UnaryOp.RELU)
        return kind.take(w, self.hparams.n_embd, self.hparams.n_ff[layer])
