"""Decoders: a stack of layers, each an attention and a feed-forward block around one residual stream.

A dense architecture is a table of differences from Llama: the class attributes of `Decoder`. Hooks (`_read_hparams`,
`_take_mixer`, `_take_feed_forward` …) are for what the table does not cover.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, NamedTuple

from llamado.ggml.graph import add, scale
from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.base import Model
from llamado.models.forward import LongRopeFactors, Pass
from llamado.models.hparams import HyperParameters, Rope, RouterKind, mrope_text_mode, read_hparams, with_sections
from llamado.models.keys import Keys
from llamado.models.parts.attention import Attention, AttentionMatrices, Heads, Mixer, OutputGate, QkNorm
from llamado.models.parts.experts import take_experts
from llamado.models.parts.feedforward import SWIGLU, FeedForward, FeedForwardKind
from llamado.models.parts.norms import LayerNorm, Norm
from llamado.models.weights import RoleWeights, Weights


class NormNames(NamedTuple):
    """Tensor names of a layer's norms: of the input of each block, and of its output; None if there is no such norm."""

    attn: str | None = "attn_norm"
    ffn: str | None = "ffn_norm"
    attn_post: str | None = None
    ffn_post: str | None = None


PRE_NORMS = NormNames()
ONE_NORM = NormNames(ffn=None)
POST_NORMS = NormNames(None, None, "post_attention_norm", "post_ffw_norm")
PRE_AND_POST_NORMS = NormNames("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm")
POST_ATTENTION_NORM_BEFORE_FFN = NormNames(ffn="post_attention_norm")
"""The file's "post attention norm" is the norm before the feed-forward network."""


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

    The defaults of the table are Llama's (arXiv 2302.13971):

    - `rope_mode`: pairs of elements that rotate together; `has_mrope`: files may have multi-dimensional positions,
      which `mrope_mode` assigns to pairs; `has_rope`: False if there is no rotary embedding.
    - `norm_eps`: key of the norms' epsilon; `norms`: the norms of a layer, of the kind of `_take_norm`.
    - `qk_norm`: norms of queries and keys; `output_gate`: activation of a gate of the attention output.
    - `scale_queries`: the queries are scaled instead of the query-key products.
    - `feed_forward`: kind of the feed-forward networks and experts; `router`: that of the experts, if there are any.
    - `is_recurrent`: layers may have no KV heads, no heads at all, or no feed-forward network.
    """

    rope_mode: ClassVar[RopeMode] = RopeMode.NORMAL
    has_mrope: ClassVar[bool] = False
    mrope_mode: ClassVar[RopeMode] = RopeMode.MROPE
    has_rope: bool = True
    norm_eps: str = "attention.layer_norm_rms_epsilon"
    norms: ClassVar[NormNames] = PRE_NORMS
    qk_norm: ClassVar[QkNorm] = QkNorm.NONE
    output_gate: ClassVar[UnaryOp | None] = None
    scale_queries: ClassVar[bool] = False
    feed_forward: FeedForwardKind = SWIGLU
    router: ClassVar[RouterKind | None] = None
    is_recurrent: ClassVar[bool] = False

    def _read_hparams(self, keys: Keys, n_vocab: int) -> HyperParameters:
        rope_mode = mrope_text_mode(keys, self.rope_mode) if self.has_mrope else self.rope_mode
        hp = read_hparams(
            keys, n_vocab=n_vocab, rope_mode=rope_mode, norm_eps=self.norm_eps, recurrent=self.is_recurrent
        )
        if self.has_mrope:
            hp = replace(hp, rope=with_sections(keys, hp.rope, self.mrope_mode))
        return hp if self.router is None else replace(hp, experts=self.router.read(keys, hp.n_ff[0]))

    def _take_weights(self, weights: Weights) -> None:
        hp = self.hparams
        self._freq_factors = take_factors(weights, hp.rope.n_dims // 2)
        self._layers = [self._take_layer(weights.layer(i, block=hp.first_block + i), i) for i in range(hp.n_layer)]

    def _take_layer(self, w: RoleWeights, layer: int) -> Layer:
        """Take a layer's weights. Raises InvalidModel."""
        names = self._norm_names(w, layer)

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._take_norm(w, name, self.hparams.n_embd)

        return Layer(
            attn_norm=norm(names.attn),
            attention=self._take_mixer(w, layer),
            attn_post_norm=norm(names.attn_post),
            ffn_norm=norm(names.ffn),
            feed_forward=self._take_feed_forward(w, layer),
            ffn_post_norm=norm(names.ffn_post),
        )

    def _norm_names(self, w: RoleWeights, layer: int) -> NormNames:
        """Return the names of a layer's norms."""
        return self.norms

    def _take_mixer(self, w: RoleWeights, layer: int) -> Mixer:
        """Take a layer's token mixer, attention by default. Raises InvalidModel."""
        return self._take_attention(w, layer)

    def _take_attention(self, w: RoleWeights, layer: int) -> Attention:
        """Take a layer's attention with the options of the table. Raises InvalidModel."""
        hp, matrices = self.hparams, AttentionMatrices.take(w, self.hparams, layer)
        q_norm, k_norm = self._take_qk_norms(w, matrices.heads)
        gate = self.output_gate
        return Attention(
            matrices=matrices,
            scale=hp.attention_scale,
            scale_queries=self.scale_queries,
            rope=self._layer_rope(layer),
            factors=self._freq_factors,
            q_norm=q_norm,
            k_norm=k_norm,
            norm_rows=self.qk_norm is QkNorm.ROWS,
            norm_after_rope=self.qk_norm is QkNorm.HEADS_AFTER_ROPE,
            clamp=hp.clamp_kqv,
            softcap=hp.attention_softcap,
            max_bias=hp.max_alibi_bias,
            gate=None if gate is None else OutputGate.take(w, hp.n_embd, matrices.heads, gate),
        )

    def _take_qk_norms(self, w: RoleWeights, heads: Heads) -> tuple[Norm | None, Norm | None]:
        """Take the norms of queries and keys. Raises InvalidModel."""
        return self.qk_norm.take(w, heads)

    def _layer_rope(self, layer: int) -> Rope | None:
        """Return the rotary embedding of a layer; None if it has none."""
        return self.hparams.rope_of(layer) if self.has_rope else None

    def _take_feed_forward(self, w: RoleWeights, layer: int) -> FeedForward:
        """Take a layer's feed-forward network or mixture of experts. Raises InvalidModel."""
        hp, kind = self.hparams, self.feed_forward
        return take_experts(w, hp, layer, kind) if hp.experts else kind.take(w, hp.n_embd, hp.n_ff[layer])

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
    """Decoder with layer norms, `has_norm_bias`: with biases, without, or (None) as the file has them."""

    norm_eps = "attention.layer_norm_epsilon"
    has_norm_bias: ClassVar[bool | None] = True

    def _take_norm(self, w: RoleWeights, name: str, n: int) -> Norm:
        return LayerNorm.take(
            w, name, n, biased=w.has(f"{name}.bias") if self.has_norm_bias is None else self.has_norm_bias
        )


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
