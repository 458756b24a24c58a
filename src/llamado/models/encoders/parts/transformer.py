"""The transformer that most encoders share: attention of all patches or frames to all (clip.cpp, build_vit)."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from math import inf
from typing import NamedTuple, TypedDict, Unpack

from llamado.ggml.graph import (
    add,
    cast,
    clamp,
    flash_attn_ext,
    glu_split,
    mul,
    permute,
    relu,
    reshape,
    rms_norm,
    sqr,
    unary,
    view_2d,
    view_3d,
    view_4d,
)
from llamado.ggml.ops import GluOp, PrecType, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.keys import EncoderKeys
from llamado.models.encoders.parts.bands import BandParts
from llamado.models.encoders.parts.experts import EncoderExperts
from llamado.models.encoders.parts.windows import Windows, join
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm, RmsNorm
from llamado.models.weights import RoleWeights, Weights

Visible = Tensor | Windows | BandParts | None
"""Positions that a position sees: by a mask, those of its window or near by, or all. A mask is F16 [n_positions,
n_positions].
"""
Rotate = Callable[[Tensor], Tensor]
"""Adds positions to queries or keys: F32 [head_dim, n_head, n_positions] to the same shape."""


class Activation(Enum):
    """Activation of the feed-forward networks: without and with a gate; None: not in use."""

    GELU = UnaryOp.GELU, GluOp.GEGLU
    GELU_ERF = UnaryOp.GELU_ERF, GluOp.GEGLU_ERF
    GELU_QUICK = UnaryOp.GELU_QUICK, GluOp.GEGLU_QUICK
    SILU = UnaryOp.SILU, GluOp.SWIGLU
    RELU_SQUARED = None, None

    @classmethod
    def read(cls, keys: EncoderKeys) -> Activation:
        """Return the activation of a file (`clip.use_gelu`, `clip.use_silu`). Raises GgufError or InvalidModel."""
        uses_gelu, uses_silu = keys.flag("use_gelu"), keys.flag("use_silu")
        if uses_gelu and uses_silu:
            raise InvalidModel("'clip.use_gelu' and 'clip.use_silu' are both true")
        return cls.GELU if uses_gelu else cls.SILU if uses_silu else cls.GELU_QUICK

    def __call__(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return the activation of x, or of `gate` times x."""
        plain, gated = self.value
        if gate is not None and gated is not None:
            return glu_split(gate, x, gated)
        return sqr(relu(x)) if plain is None else unary(x, plain)


class EncoderFeedForward(NamedTuple):
    """Feed-forward network, with or without a gate.

    `limit`: the greatest gate, and magnitude of what it is multiplied by, with SILU; 0: none (GLM-5V).
    """

    up: Linear
    down: Linear
    gate: Linear | None
    activation: Activation
    limit: float = 0.0

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, activation: Activation) -> EncoderFeedForward:
        """Take the network of a layer, whose width is that of its matrices. Raises InvalidModel.

        Old converters exchanged the names of the two matrices; the shapes tell.
        """
        up, down = "ffn_up", "ffn_down"
        if w.ne("ffn_down.weight")[0] == n_embd != w.ne("ffn_up.weight")[0]:
            up, down = down, up
        n_ff = w.ne(f"{up}.weight")[1]
        gate = w.linear("ffn_gate", n_embd, n_ff) if w.has("ffn_gate.weight") else None
        return cls(w.linear(up, n_embd, n_ff), w.linear(down, n_ff, n_embd), gate, activation)

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        up = self.up(step, x, f"ffn_up-{name}")
        gate = None if self.gate is None else self.gate(step, x, f"ffn_gate-{name}")
        if gate is not None and self.limit and self.activation is Activation.SILU:
            gate, up = clamp(gate, -inf, self.limit), clamp(up, -self.limit, self.limit)
        return self.down(step, self.activation(up, gate), f"ffn_out-{name}")


class EncoderAttention(NamedTuple):
    """Attention of all positions to all, from one fused matrix or three."""

    qkv: Linear | None
    q: Linear | None
    k: Linear | None
    v: Linear | None
    out: Linear
    q_norm: LayerNorm | RmsNorm | None
    k_norm: LayerNorm | RmsNorm | None
    sinks: Tensor | None
    n_head: int
    n_head_kv: int
    head_dim: int
    scale: float
    has_unit_values: bool = False
    """True if each head of the values is divided by its RMS."""

    @classmethod
    def take(
        cls, w: RoleWeights, n_embd: int, n_head: int, n_head_kv: int, head_dim: int, norm: NormKind, scale: float
    ) -> EncoderAttention:
        """Take the attention of a layer. Raises InvalidModel."""
        n_q, n_kv = n_head * head_dim, n_head_kv * head_dim
        fused = w.has("attn_qkv.weight")

        def linear(name: str, n_out: int) -> Linear | None:
            return None if fused else w.linear(name, n_embd, n_out)

        def norm_of(name: str) -> LayerNorm | RmsNorm | None:
            return take_norm(w, name, w.ne(f"{name}.weight")[0], norm) if w.has(f"{name}.weight") else None

        return cls(
            qkv=w.linear("attn_qkv", n_embd, n_q + 2 * n_kv) if fused else None,
            q=linear("attn_q", n_q),
            k=linear("attn_k", n_kv),
            v=linear("attn_v", n_kv),
            out=w.linear("attn_out", n_q, n_embd),
            q_norm=norm_of("attn_q_norm"),
            k_norm=norm_of("attn_k_norm"),
            sinks=w.optional("attn_sinks", n_head),
            n_head=n_head,
            n_head_kv=n_head_kv,
            head_dim=head_dim,
            scale=scale,
        )

    def __call__(
        self, step: EncoderPass, x: Tensor, rotate: Rotate | None, mask: Visible, name: str, n_sequences: int = 1
    ) -> Tensor:
        q, k, v = self._project(step, x, name)
        if self.has_unit_values:
            v = rms_norm(v, step.norm_eps, f"v_norm-{name}")
        if rotate is not None:
            q, k = rotate(q), rotate(k)
        if n_sequences > 1:
            q, k, v = (split_sequences(t, n_sequences) for t in (q, k, v))
        return self.out(step, attend(q, k, v, self.scale, mask, self.sinks), f"attn_out-{name}")

    def _project(self, step: EncoderPass, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values: F32 [head_dim, heads, n_positions]."""
        dim, n_q, n_kv = self.head_dim, self.n_head * self.head_dim, self.n_head_kv * self.head_dim
        if self.qkv is not None:
            rows = self.qkv(step, x, f"qkv-{name}")

            def heads(n: int, at: int) -> Tensor:
                return view_3d(rows, dim, n, rows.ne[1], 4 * dim, rows.nb[1], 4 * at)

            q, k, v = heads(self.n_head, 0), heads(self.n_head_kv, n_q), heads(self.n_head_kv, n_q + n_kv)
        else:
            assert self.q is not None and self.k is not None and self.v is not None
            q, k, v = (
                part(step, x, f"{which}-{name}") for part, which in ((self.q, "q"), (self.k, "k"), (self.v, "v"))
            )
            if self.q_norm is not None and self.q_norm.weight.ne[0] != dim:
                q = self.q_norm(step, q, f"q_norm-{name}")
            if self.k_norm is not None and self.k_norm.weight.ne[0] != dim:
                k = self.k_norm(step, k, f"k_norm-{name}")
            n = x.ne[1]
            q, k, v = (
                reshape(t, dim, heads, n) for t, heads in ((q, self.n_head), (k, self.n_head_kv), (v, self.n_head_kv))
            )
        if self.q_norm is not None and self.q_norm.weight.ne[0] == dim:
            q = self.q_norm(step, q, f"q_norm-{name}")
        if self.k_norm is not None and self.k_norm.weight.ne[0] == dim:
            k = self.k_norm(step, k, f"k_norm-{name}")
        return q, k, v


def split_sequences(x: Tensor, n: int) -> Tensor:
    """Return queries, keys or values of `n` sequences, one behind the other: F32 [head_dim, heads, n_positions, n]."""
    dim, heads, n_all = x.ne[:3]
    return view_4d(x, dim, heads, n_all // n, n, x.nb[1], x.nb[2], n_all // n * x.nb[2])


_MOST_PAIRS = 1 << 22
"""Most pairs of queries and keys of an operation: about a tenth of a second on two cores, the time for which encoding
may delay answers.
"""


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Visible = None, sinks: Tensor | None = None) -> Tensor:
    """Return attention of all positions of a sequence: F32 [head_dim · n_head, n_positions · n_sequences].

    q, k and v are F32 [head_dim, heads, n_positions, n_sequences]; with windows or a band, there is one
    sequence.
    """
    if isinstance(mask, Windows):
        groups = zip(mask.of(q), mask.of(k), mask.of(v), strict=True)
        return join([attend(*group, scale, None, sinks) for group in groups])
    if isinstance(mask, BandParts):
        return join([attend(part.queries(q), part.keys(k), part.keys(v), scale, m, sinks) for part, m in mask.parts])
    k, v = (cast(permute(t, 0, 2, 1, 3), TensorType.F16) for t in (k, v))
    n, n_at_once = q.ne[2], max(_MOST_PAIRS // k.ne[1], 1)
    if n <= n_at_once or q.ne[3] > 1:
        return _attend(q, k, v, scale, mask, sinks)
    parts = []
    for first in range(0, n, n_at_once):
        n_part = min(n_at_once, n - first)
        queries = view_4d(q, *q.ne[:2], n_part, 1, *q.nb[1:], first * q.nb[2])
        rows = None if mask is None else view_2d(mask, mask.ne[0], n_part, mask.nb[1], first * mask.nb[1])
        parts.append(_attend(queries, k, v, scale, rows, sinks))
    return join(parts)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return attention with one operation: F32 [head_dim · n_head, n_positions · n_sequences]. k and v are F16
    [head_dim, n_positions, heads, n_sequences].
    """
    out = flash_attn_ext(permute(q, 0, 2, 1, 3), k, v, mask, scale, precision=PrecType.F32, sinks=sinks)
    return reshape(out, out.ne[0] * out.ne[1], out.ne[2] * out.ne[3])


class NormKind(Enum):
    """Kind of an encoder's norms."""

    LAYER = "layer"
    RMS = "rms"


def take_norm(w: RoleWeights, name: str, n: int, kind: NormKind) -> LayerNorm | RmsNorm:
    """Take a norm, with the bias that the file has. Raises InvalidModel."""
    weight, bias = w.require(f"{name}.weight", n), w.optional(f"{name}.bias", n)
    return LayerNorm(weight, bias) if kind is NormKind.LAYER else RmsNorm(weight, bias)


class EncoderLayer(NamedTuple):
    """One layer: attention and a feed-forward network, each with norms and scales as far as the file has them."""

    attn_norm: LayerNorm | RmsNorm
    attention: EncoderAttention
    attn_scale: Tensor | None
    attn_post_norm: LayerNorm | RmsNorm | None
    ffn_norm: LayerNorm | RmsNorm
    feed_forward: EncoderFeedForward | EncoderExperts
    ffn_post_norm: LayerNorm | RmsNorm | None
    ffn_scale: Tensor | None
    out_scale: Tensor | None

    def __call__(
        self, step: EncoderPass, x: Tensor, rotate: Rotate | None, mask: Visible, name: str, n_sequences: int = 1
    ) -> Tensor:
        h = self.attention(step, self.attn_norm(step, x, f"ln1-{name}"), rotate, mask, name, n_sequences)
        if self.attn_scale is not None:
            h = mul(h, self.attn_scale)
        if self.attn_post_norm is not None:
            h = self.attn_post_norm(step, h, f"attn_post_norm-{name}")
        x = add(h, x, f"ffn_inp-{name}")
        h = self.feed_forward(step, self.ffn_norm(step, x, f"ln2-{name}"), name)
        if self.ffn_post_norm is not None:
            h = self.ffn_post_norm(step, h, f"ffn_post_norm-{name}")
        if self.ffn_scale is not None:
            h = mul(h, self.ffn_scale)
        x = add(x, h, f"layer_out-{name}")
        return x if self.out_scale is None else mul(x, self.out_scale)


class TransformerOptions(TypedDict, total=False):
    """Options of EncoderTransformer.

    `prefix` of the tensors' names: "v". `norm`: layer norms. `activation`: that of the file. `n_layer`: the number of
    layers in use: all. `scale` of the attention: 1/√head_dim. `has_unit_values`: the
    heads of the values are divided by their RMS. `limit`: see EncoderFeedForward; 0. `head_dim`: that of the file.
    `n_experts_used`: of the experts that a layer has; 0.
    """

    prefix: str
    norm: NormKind
    activation: Activation
    n_layer: int
    scale: float
    has_unit_values: bool
    limit: float
    head_dim: int
    n_experts_used: int


class EncoderTransformer:
    """The layers of an encoder and the norms before and behind them, as far as the file has them."""

    def __init__(self, keys: EncoderKeys, weights: Weights, **options: Unpack[TransformerOptions]) -> None:
        """Take the weights `prefix`.blk.N.*. Raises GgufError or InvalidModel."""
        prefix, norm, scale = options.get("prefix", "v"), options.get("norm", NormKind.LAYER), options.get("scale")
        activation, n_layer = options.get("activation"), options.get("n_layer")
        self.n_embd = keys.int_("embedding_length")
        self.n_head = keys.int_("attention.head_count")
        self.head_dim = options.get("head_dim") or keys.int_("attention.head_dim", self.n_embd // self.n_head)
        self.norm_eps = keys.float_("attention.layer_norm_epsilon")
        self.activation = Activation.read(keys) if activation is None else activation
        n_head_kv = keys.int_("attention.head_count_kv", self.n_head)
        if self.n_head % n_head_kv:
            raise InvalidModel(f"{self.n_head} heads of queries do not share {n_head_kv} heads of keys evenly")
        if not self.head_dim:
            raise InvalidModel(f"{self.n_head} heads of a width of {self.n_embd}")
        self._has_unit_values, self._limit = options.get("has_unit_values", False), options.get("limit", 0.0)
        self._n_experts_used = options.get("n_experts_used", 0)
        n_all = keys.int_("block_count")
        self.layers = [
            self._take_layer(weights.layer(i, stack=f"{prefix}.blk"), norm, n_head_kv, scale)
            for i in range(n_all if n_layer is None else min(n_layer, n_all))
        ]
        self.pre_norm, self.post_norm = (
            take_norm(weights.shared, f"{prefix}.{which}", self.n_embd, norm)
            if weights.has(f"{prefix}.{which}.weight")
            else None
            for which in ("pre_ln", "post_ln")
        )

    def _take_layer(self, w: RoleWeights, norm: NormKind, n_head_kv: int, scale: float | None) -> EncoderLayer:
        """Take a layer's weights. Raises InvalidModel."""
        n, dim = self.n_embd, self.head_dim
        # One for all channels, or one for each.
        n_scales = 1 if w.has("out_scale.weight") and w.ne("out_scale.weight")[0] == 1 else n
        attention = EncoderAttention.take(
            w, n, self.n_head, n_head_kv, dim, norm, dim**-0.5 if scale is None else scale
        )

        def optional_norm(name: str) -> LayerNorm | RmsNorm | None:
            return take_norm(w, name, n, norm) if w.has(f"{name}.weight") else None

        return EncoderLayer(
            attn_norm=take_norm(w, "ln1", n, norm),
            attention=attention._replace(has_unit_values=self._has_unit_values),
            attn_scale=w.optional("ls1.weight", n),
            attn_post_norm=optional_norm("attn_post_norm"),
            ffn_norm=take_norm(w, "ln2", n, norm),
            feed_forward=EncoderExperts.take(w, n, self._n_experts_used)
            if self._n_experts_used and w.has("ffn_gate_exps.weight")
            else EncoderFeedForward.take(w, n, self.activation)._replace(limit=self._limit),
            ffn_post_norm=optional_norm("ffn_post_norm"),
            ffn_scale=w.optional("ls2.weight", n),
            out_scale=w.optional("out_scale.weight", n_scales),
        )

    def __call__(
        self,
        step: EncoderPass,
        x: Tensor,
        rotate: Rotate | None = None,
        mask: Callable[[int], Visible] = lambda layer: None,
        on_layer: Callable[[int, Tensor], None] | None = None,
        n_sequences: int = 1,
    ) -> Tensor:
        """Return the hidden states behind the last layer and its norm: F32 [n_embd, n_positions].

        `mask` returns what the positions of a layer see. `on_layer` is called with each layer's output. x holds
        `n_sequences` sequences of the same length, one behind the other.
        """
        if self.pre_norm is not None:
            x = self.pre_norm(step, x, "pre_ln")
        for i, layer in enumerate(self.layers):
            x = layer(step, x, rotate, mask(i), str(i), n_sequences)
            if on_layer is not None:
                on_layer(i, x)
        return x if self.post_norm is None else self.post_norm(step, x, "post_ln")
