"""The t5encoder architecture: the encoders of T5, Flan-T5 and T5 v1.1."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.ops import GluOp, RopeMode, UnaryOp
from llamado.models.decoder import Decoder, Layer
from llamado.models.encoder import Encoder
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads, Projections
from llamado.models.parts.feedforward import GatedFeedForward, UngatedFeedForward
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights, Weights


class T5EncoderModel(Encoder, Decoder):
    """Pre-norm encoder with relative position biases and unscaled attention scores (arXiv 1910.10683).

    Layers without biases of their own use the first layer's. The feed-forward network is ReLU, or GEGLU in v1.1.
    Attention is causal unless the file says otherwise, as in llama.cpp.
    """

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        self._n_buckets = keys.int_("attention.relative_buckets_count")
        hp = read_hparams(keys, n_vocab=n_vocab, rope_mode=RopeMode.NORMAL)
        return replace(hp, attention_scale=1.0)

    def _take_head(self, weights: Weights) -> None:
        hp = self.hparams
        self._output_norm = self._take_norm(weights.output, "enc.output_norm", hp.n_embd)
        weights.output.optional("output.weight", hp.n_embd, hp.n_vocab)  # unused

    def _take_weights(self, weights: Weights) -> None:
        first = weights.layer(0, "enc.blk").require("attn_rel_b.weight", self.hparams.n_head[0], self._n_buckets)
        self._biases = first
        self._layers = [self._take_layer(weights.layer(i, "enc.blk"), i) for i in range(self.hparams.n_layer)]

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        hp, heads = self.hparams, Heads.of(self.hparams, layer)
        n_ff = hp.n_ff[layer]
        gated = w.has("ffn_gate.weight")
        return Layer(
            attn_norm=RmsNorm.take(w, "attn_norm", hp.n_embd),
            attention=Attention(
                matrices=AttentionMatrices(
                    heads,
                    Projections(
                        w.linear("attn_q", hp.n_embd, heads.n * heads.dim_k),
                        w.linear("attn_k", hp.n_embd, heads.n_kv * heads.dim_k),
                        w.linear("attn_v", hp.n_embd, heads.n_kv * heads.dim_v),
                    ),
                    w.linear("attn_o", heads.n * heads.dim_v, hp.n_embd),
                ),
                bias=w.optional("attn_rel_b.weight", heads.n, self._n_buckets) or self._biases,
                rope=None,
                scale=hp.attention_scale,
            ),
            ffn_norm=RmsNorm.take(w, "ffn_norm", hp.n_embd),
            feed_forward=GatedFeedForward.take(w, hp.n_embd, n_ff, GluOp.GEGLU)
            if gated
            else UngatedFeedForward.take(w, hp.n_embd, n_ff, UnaryOp.RELU),
        )
