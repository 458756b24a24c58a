"""Decoders: a stack of layers, each an attention and a feed-forward block around one residual stream."""

from __future__ import annotations

from typing import ClassVar, NamedTuple

from llamado.ggml.graph import add, scale
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.forward import LongRopeFactors, Pass
from llamado.models.hparams import HyperParameters, read_hparams
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Mixer
from llamado.models.parts.feedforward import FeedForward, GatedFeedForward
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.weights import RoleWeights, Weights


class Layer(NamedTuple):
    """Weights of a layer. The norms before each block, and those of the block outputs, are optional."""

    attention: Mixer
    feed_forward: FeedForward
    attn_norm: Norm | None = None
    ffn_norm: Norm | None = None
    attn_post_norm: Norm | None = None
    ffn_post_norm: Norm | None = None


def take_factors(weights: Weights, n: int) -> Tensor | LongRopeFactors | None:
    """Take the divisors of the rotary frequencies: one set in Llama 3, two in LongRoPE."""
    factors = weights.shared.optional("rope_freqs.weight", n)
    short, long = (weights.shared.optional(f"rope_factors_{which}.weight", n) for which in ("short", "long"))
    return factors or (LongRopeFactors(short, long) if short or long else None)


class Decoder(Model):
    """Sequential residual blocks: x + attention(norm(x)), then x + ffn(norm(x)).

    The defaults are Llama's (arXiv 2302.13971); `rope_mode` gives the pairs of elements that rotate together.
    """

    rope_mode: ClassVar[RopeMode] = RopeMode.NORMAL

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=self.rope_mode)

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._freq_factors = take_factors(weights, hp.rope.n_dims // 2)
        self._layers = [self._take_layer(weights.layer(i, block=hp.first_block + i), i) for i in range(hp.n_layer)]

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        """Take a layer's weights, with norms of the output norm's kind before each block. Raises InvalidModel."""
        n_embd = self.hparams.n_embd
        return Layer(
            attn_norm=self._take_norm(w, "attn_norm", n_embd),
            attention=self._take_attention(w, layer),
            ffn_norm=self._take_norm(w, "ffn_norm", n_embd),
            feed_forward=self._take_feed_forward(w, layer),
        )

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        """Take a layer's attention with the common options. Raises InvalidModel."""
        hp = self.hparams
        return Attention(
            matrices=AttentionMatrices.take(w, hp, layer),
            scale=hp.attention_scale,
            rope=hp.rope_of(layer),
            factors=self._freq_factors,
        )

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        """Take a layer's feed-forward network, SwiGLU by default. Raises InvalidModel."""
        return GatedFeedForward.take(w, self.hparams.n_embd, self.hparams.n_ff[layer])

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        h = x if w.attn_norm is None else w.attn_norm(step, x, f"attn_norm-{i}")
        attended = w.attention(step, i, h)
        if attended is None:
            return None
        h, x = step.keep_outputs(i, attended, x)
        if w.attn_post_norm is not None:
            h = w.attn_post_norm(step, h, f"attn_post_norm-{i}")
        x = self._add(h, x, f"ffn_inp-{i}")
        h = x if w.ffn_norm is None else w.ffn_norm(step, x, f"ffn_norm-{i}")
        h = w.feed_forward(step, i, h)
        if w.ffn_post_norm is not None:
            h = w.ffn_post_norm(step, h, f"ffn_post_norm-{i}")
        return self._add(h, x, f"l_out-{i}")

    def _add(self, h: Tensor, x: Tensor, name: str) -> Tensor:
        """Add a block's output to the residual stream."""
        factor = self.hparams.residual_scale
        return add(h if factor == 1.0 else scale(h, factor), x, name)


class LayerNormDecoder(Decoder):
    """Decoder with layer norms, biased if the file has biases."""

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        return read_hparams(keys, n_vocab=n_vocab, rope_mode=self.rope_mode, norm_eps="attention.layer_norm_epsilon")

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(w, name, n, biased=w.has(f"{name}.bias"))


class ParallelDecoder(Decoder):
    """Parallel residual blocks: x + attention(norm(x)) + ffn(norm(x)), with one norm or two."""

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        w, i = self._layers[layer], layer
        first = x if w.attn_norm is None else w.attn_norm(step, x, f"attn_norm-{i}")
        attended = w.attention(step, i, first)
        if attended is None:
            return None
        attended, x, first = step.keep_outputs(i, attended, x, first)
        h = first if w.ffn_norm is None else w.ffn_norm(step, x, f"ffn_norm-{i}")
        return add(add(attended, w.feed_forward(step, i, h)), x, f"l_out-{i}")
