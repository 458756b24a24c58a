"""RWKV building blocks: time mixing and channel mixing, both based on token shift."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from llamado.ggml.graph import (
    add,
    concat,
    cont,
    exp,
    gated_linear_attn,
    l2_norm,
    mul,
    norm,
    permute,
    relu,
    repeat,
    reshape,
    rwkv_wkv6,
    rwkv_wkv7,
    scale,
    sigmoid,
    silu,
    sqr,
    sub,
    sum_rows,
    tanh,
    unary,
    view_1d,
    view_2d,
    view_3d,
)
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.models.forward import Linear, Pass
from llamado.models.weights import RoleWeights

_HEAD_EPS = 64e-5
"""Epsilon of head norms."""
_DECAY = -0.606531
"""Minimum log decay in RWKV-7: -e^(-1/2)."""


def token_shift(step: Pass, layer: int, number: int, x: Tensor) -> Tensor:
    """Token shift: return the predecessor of each token of x [n, n_tokens].

    State `number` holds the last token of each sequence.
    """
    n_embd, n_tokens = x.ne[:2]
    n = n_tokens // step.n_seqs
    whole = reshape(step.graph.expand(x), n_embd, n, step.n_seqs)
    last = view_3d(whole, n_embd, 1, step.n_seqs, whole.nb[1], whole.nb[2], (n - 1) * whole.nb[1])
    found = step.graph.expand(step.read_states(layer, number))
    if n > 1:
        others = view_3d(whole, n_embd, n - 1, step.n_seqs, whole.nb[1], whole.nb[2])
        found = step.graph.expand(concat(reshape(found, n_embd, 1, step.n_seqs), others, 1))
    step.store_states(layer, number, cont(last, n_embd, step.n_seqs))
    return reshape(found, n_embd, n_tokens)


def lerp(x: Tensor, away: Tensor, part: Tensor) -> Tensor:
    """Interpolate between x and x + away by `part`."""
    return add(mul(away, part), x)


class TimeMix(Protocol):
    """Time mixing of x [n, n_tokens]. State 0 of a layer is the token before, state 1 that of the heads."""

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor: ...


class LowRankMix(NamedTuple):
    """A low-rank matrix with an optional activation between the factors, and a bias."""

    a: Tensor
    b: Tensor
    bias: Tensor | None = None

    @classmethod
    def take(cls, w: RoleWeights, name: str, n_embd: int) -> LowRankMix:
        """Take `name1` [n_embd, rank], `name2` and, if present, the bias `name0`. Raises InvalidModel."""
        rank = w.ne(f"{name}1.weight")[1]
        a, b = w.require(f"{name}1.weight", n_embd, rank), w.require(f"{name}2.weight", rank, n_embd)
        return cls(a, b, w.optional(f"{name}0.weight", n_embd))

    def __call__(self, step: Pass, x: Tensor, name: str, between: UnaryOp | None = None) -> Tensor:
        h = step.mul_mat(self.a, x, f"{name}_a")
        y = step.mul_mat(self.b, h if between is None else unary(h, between), name)
        return y if self.bias is None else add(y, self.bias, name)


class HeadNorm(NamedTuple):
    """Layer norm per head, with weight and bias for each element of all heads."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int) -> HeadNorm | None:
        """Take `time_mix_ln`, if present. Raises InvalidModel."""
        weight = w.optional("time_mix_ln.weight", n_embd)
        return None if weight is None else cls(weight, w.require("time_mix_ln.bias", n_embd))

    def __call__(self, x: Tensor, size: int) -> Tensor:
        n_embd, n_tokens = x.ne[:2]
        y = norm(reshape(x, size, n_embd // size, n_tokens), _HEAD_EPS)
        return add(mul(reshape(y, n_embd, n_tokens), self.weight), self.bias)


def _split_result(y: Tensor, size: int, n_embd: int, n_tokens: int, n_seqs: int) -> tuple[Tensor, Tensor]:
    """Split an operation's result into token outputs [n_embd, n_tokens] and new states [all of a sequence, n_seqs]."""
    row = n_embd * y.nb[0]
    found = view_2d(y, n_embd, n_tokens, row)
    return found, view_2d(y, n_embd * size, n_seqs, row * size, row * n_tokens)


class TimeMix7(NamedTuple):
    """RWKV-7 time mixing (arXiv 2503.14456)."""

    size: int
    lerp: Tensor
    w: LowRankMix
    a: LowRankMix
    v: LowRankMix | None
    g: LowRankMix | None
    k_k: Tensor
    k_a: Tensor
    r_k: Tensor
    receptance: Linear
    key: Linear
    value: Linear
    norm: HeadNorm | None
    out: Linear

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, size: int, layer: int) -> TimeMix7:
        """Take the tensors `time_mix_…`. Raises InvalidModel."""
        gated = w.has("time_mix_g1.weight")
        if layer == 0:
            w.ignore(*(f"time_mix_v{i}.weight" for i in range(3)))  # later layers mix in the first layer's value
        return cls(
            size=size,
            lerp=w.require("time_mix_lerp_fused.weight", n_embd, 1, 1, 6 if gated else 5),
            w=LowRankMix.take(w, "time_mix_w", n_embd),
            a=LowRankMix.take(w, "time_mix_a", n_embd),
            v=LowRankMix.take(w, "time_mix_v", n_embd) if layer else None,
            g=LowRankMix.take(w, "time_mix_g", n_embd) if gated else None,
            k_k=w.require("time_mix_k_k.weight", n_embd),
            k_a=w.require("time_mix_k_a.weight", n_embd),
            r_k=w.require("time_mix_r_k.weight", n_embd),
            receptance=w.linear("time_mix_receptance", n_embd, n_embd),
            key=w.linear("time_mix_key", n_embd, n_embd),
            value=w.linear("time_mix_value", n_embd, n_embd),
            norm=HeadNorm.take(w, n_embd),
            out=w.linear("time_mix_output", n_embd, n_embd),
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        n_embd, n_tokens = x.ne[:2]
        heads = self.size, n_embd // self.size, n_tokens
        away = sub(token_shift(step, layer, 0, x), x)
        parts = [view_1d(self.lerp, n_embd, i * self.lerp.nb[3]) for i in range(self.lerp.ne[3])]
        x_r, x_w, x_k, x_v, x_a, *x_g = (lerp(x, away, part) for part in parts)
        r = self.receptance(step, x_r, f"r-{layer}")
        w = exp(scale(sigmoid(self.w(step, x_w, f"w-{layer}", UnaryOp.TANH)), _DECAY))
        k, v = self.key(step, x_k, f"k-{layer}"), self._value(step, layer, x_v)
        a = sigmoid(self.a(step, x_a, f"a-{layer}"))
        g = None if self.g is None else self.g(step, x_g[0], f"g-{layer}", UnaryOp.SIGMOID)
        kk = l2_norm(reshape(mul(k, self.k_k), *heads), 1e-12)
        ka = mul(k, self.k_a)
        k = add(k, sub(mul(a, ka), ka))
        r, w, k, v, a = (reshape(t, *heads) for t in (r, w, k, v, a))
        away, back = unary(kk, UnaryOp.NEG), mul(kk, a)
        for tensor in (r, w, k, v, away, back):
            step.graph.expand(tensor)
        y = rwkv_wkv7(r, w, k, v, away, back, step.read_states(layer, 1), f"wkv-{layer}")
        found, after = _split_result(y, self.size, n_embd, n_tokens, step.n_seqs)
        step.store_states(layer, 1, after)
        found = found if self.norm is None else self.norm(found, self.size)
        own = sum_rows(mul(mul(k, r), reshape(self.r_k, *heads[:2])))
        found = add(found, reshape(mul(v, own), n_embd, n_tokens))
        return self.out(step, found if g is None else mul(found, g), f"time_mix-{layer}")

    def _value(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        """Return the values; all layers but the first interpolate towards the first layer's values."""
        v = self.value(step, x, f"v-{layer}")
        first = step.shared("first_value", lambda: v)
        if self.v is None:
            return v
        return lerp(v, sub(first, v), sigmoid(self.v(step, x, f"v_mix-{layer}")))


class TimeMix6(NamedTuple):
    """RWKV-6 time mixing (arXiv 2404.05892); without `first`, gated linear attention, as in conversions of Qwen."""

    size: int
    lerp_x: Tensor
    lerp: Tensor
    w1: Tensor
    w2: Tensor
    decay: LowRankMix
    first: Tensor | None
    receptance: Linear
    key: Linear
    value: Linear
    gate: Linear
    norm: HeadNorm | None
    out: Linear

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, size: int, n_head_kv: int) -> TimeMix6:
        """Take the tensors `time_mix_…`; there are `n_head_kv` heads of keys and values. Raises InvalidModel."""
        rank, n_kv = w.ne("time_mix_w2.weight")[0], n_head_kv * size
        narrow = w.ne("time_mix_decay_w1.weight")[1]
        return cls(
            size=size,
            lerp_x=w.require("time_mix_lerp_x.weight", n_embd),
            lerp=w.require("time_mix_lerp_fused.weight", n_embd, 1, 1, 5),
            w1=w.require("time_mix_w1.weight", n_embd, 5 * rank),
            w2=w.require("time_mix_w2.weight", rank, n_embd, 5),
            decay=LowRankMix(
                w.require("time_mix_decay_w1.weight", n_embd, narrow),
                w.require("time_mix_decay_w2.weight", narrow, n_embd),
                w.require("time_mix_decay.weight", n_embd),
            ),
            first=w.optional("time_mix_first.weight", size, n_embd // size),
            receptance=w.linear("time_mix_receptance", n_embd, n_embd),
            key=w.linear("time_mix_key", n_embd, n_kv),
            value=w.linear("time_mix_value", n_embd, n_kv),
            gate=w.linear("time_mix_gate", n_embd, n_embd),
            norm=HeadNorm.take(w, n_embd),
            out=w.linear("time_mix_output", n_embd, n_embd),
        )

    def __call__(self, step: Pass, layer: int, x: Tensor) -> Tensor:
        n_embd, n_tokens = x.ne[:2]
        heads = self.size, n_embd // self.size, n_tokens
        away = sub(token_shift(step, layer, 0, x), x)
        x_w, x_k, x_v, x_r, x_g = (lerp(x, away, part) for part in self._parts(step, layer, lerp(x, away, self.lerp_x)))
        r = self.receptance(step, x_r, f"r-{layer}")
        k, v = (
            self._repeat_heads(t(step, of, f"{name}-{layer}"))
            for t, of, name in ((self.key, x_k, "k"), (self.value, x_v, "v"))
        )
        w = exp(unary(exp(self.decay(step, x_w, f"w-{layer}", UnaryOp.TANH)), UnaryOp.NEG))
        g = self.gate(step, x_g, f"g-{layer}")
        r, k, v, w = (reshape(t, *heads) for t in (r, k, v, w))
        g = sigmoid(g) if self.first is None else silu(g)
        if self.first is None:
            k = sub(k, mul(k, w))
        r, k, v, w, g = (step.graph.expand(t) for t in (r, k, v, w, g))
        states = step.read_states(layer, 1)
        if self.first is None:
            y = gated_linear_attn(k, v, r, w, states, self.size**-0.5, f"gla-{layer}")
        else:
            y = rwkv_wkv6(k, v, r, self.first, w, states, f"wkv-{layer}")
        found, after = _split_result(y, self.size, n_embd, n_tokens, step.n_seqs)
        step.store_states(layer, 1, after)
        found = found if self.norm is None else self.norm(found, self.size)
        return self.out(step, mul(found, g), f"time_mix-{layer}")

    def _parts(self, step: Pass, layer: int, x: Tensor) -> list[Tensor]:
        """Return the interpolation weights of decays, keys, values, receptances and gates: [n_embd, n_tokens] each."""
        rank, n_embd, n_tokens = self.w2.ne[0], x.ne[0], x.ne[1]
        narrow = reshape(tanh(step.mul_mat(self.w1, x, f"x_mix-{layer}")), rank, 5, n_tokens)
        parts = step.mul_mat(self.w2, cont(permute(narrow, 0, 2, 1, 3)), f"x_mixed-{layer}")
        return [
            add(
                view_2d(parts, n_embd, n_tokens, parts.nb[1], i * parts.nb[2]),
                view_1d(self.lerp, n_embd, i * self.lerp.nb[3]),
            )
            for i in range(5)
        ]

    def _repeat_heads(self, x: Tensor) -> Tensor:
        """Repeat key or value heads for the receptance heads that share them."""
        n_embd, n_tokens = self.out.weight.ne[0], x.ne[1]
        n, each = x.ne[0] // self.size, n_embd // x.ne[0]
        return x if each == 1 else repeat(reshape(x, self.size, 1, n, n_tokens), self.size, each, n, n_tokens)


class ChannelMix(NamedTuple):
    """Channel mixing: value(relu(key(x))²) with token shift; gated by `receptance` in RWKV-6."""

    lerp_k: Tensor
    key: Linear
    value: Linear
    lerp_r: Tensor | None = None
    receptance: Linear | None = None

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, n_ff: int) -> ChannelMix:
        """Take the tensors `channel_mix_…`. Raises InvalidModel."""
        key, value = w.linear("channel_mix_key", n_embd, n_ff), w.linear("channel_mix_value", n_ff, n_embd)
        lerp_k, lerp_r = w.require("channel_mix_lerp_k.weight", n_embd), w.optional("channel_mix_lerp_r.weight", n_embd)
        if lerp_r is None:
            return cls(lerp_k, key, value)
        return cls(lerp_k, key, value, lerp_r, w.linear("channel_mix_receptance", n_embd, n_embd))

    def __call__(self, step: Pass, layer: int, x: Tensor, previous: Tensor) -> Tensor:
        away = sub(previous, x)
        k = sqr(relu(self.key(step, lerp(x, away, self.lerp_k), f"channel_k-{layer}")))
        y = self.value(step, k, f"channel_v-{layer}")
        if self.lerp_r is None or self.receptance is None:
            return y
        return mul(sigmoid(self.receptance(step, lerp(x, away, self.lerp_r), f"channel_r-{layer}")), y)
