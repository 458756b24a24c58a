"""Gemma 4's encoder of sounds: a conformer whose frames see the eleven before them (clip.cpp, models/gemma4a.cpp)."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    Graph,
    add,
    cont,
    mul,
    mul_mat,
    norm,
    pad,
    permute,
    relu,
    reshape,
    rms_norm,
    scale,
    soft_max_ext,
    tanh,
    view_2d,
    view_4d,
)
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import EncoderInput
from llamado.media.mel import gemma4_mel
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.parts.clamped import ClampedPass, read_limits
from llamado.models.encoders.parts.rows import as_f32
from llamado.models.encoders.parts.transformer import NormKind
from llamado.models.encoders.sounds.conformer import POSITIONS, ConvModule, HalfFeedForward
from llamado.models.encoders.sounds.convolution import (
    PATCHES,
    Axis,
    Conv2d,
    FirstConv2d,
    halved,
    optional_bias,
    patches,
)
from llamado.models.encoders.sounds.encoder import SoundEncoder
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import RmsNorm
from llamado.models.weights import RoleWeights, Weights

_EPS = 1e-6
_BLOCK = _PAST = 12
"""Queries of a block, and keys before them."""

_KEYS = _BLOCK + _PAST
_SOFTCAP = 50.0
_KERNEL = 5
_MASK = "mask"


class Gemma4AudioEncoder(SoundEncoder):
    """A token for each 40 ms, in pieces of 30 seconds."""

    begin, end = "<|audio>", "<audio|>"

    def _take_weights(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        self.n_mel = keys.int_("num_mel_bins")
        self.width = n = keys.int_("embedding_length")
        self.n_head = keys.int_("attention.head_count")
        if n % self.n_head or n % 2:
            raise InvalidModel(f"{self.n_head} heads do not share a width of {n} evenly")
        self._first = FirstConv2d.take(w, "a.conv1d.0")
        self._second = Conv2d.take(w, "a.conv1d.1", self._first.weight.ne[3], Axis.BAND)
        self._conv_norms = [
            w.optional(f"a.conv1d.{i}.norm.weight", n_channels)
            for i, n_channels in enumerate((self._first.weight.ne[3], self._second.n_out))
        ]
        self._in = w.linear("a.input_projection", self._second.n_out * halved(halved(self.n_mel)), n)
        layers = (weights.layer(i, stack="a.blk") for i in range(keys.int_("block_count")))
        self._layers = [_Layer.take(layer, n, self.n_head) for layer in layers]
        n_out = n
        self._out = None
        if w.has("a.pre_encode.out.weight"):
            n_out = w.ne("a.pre_encode.out.weight")[1]
            self._out = w.linear("a.pre_encode.out", n, n_out)
        self._norm = w.optional("mm.a.soft_emb_norm.weight", n_out)
        self.n_embd = w.ne("mm.a.input_projection.weight")[1]
        self._projection = w.linear("mm.a.input_projection", n_out, self.n_embd)
        self._limits = read_limits(weights)

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return gemma4_mel(samples, self.n_mel)

    def n_tokens(self, n_frames: int) -> int:
        return halved(halved(n_frames))

    def encoder_input(self, frames: NDArray[np.float32]) -> EncoderInput:
        n_blocks = -(-self.n_tokens(len(frames)) // _BLOCK)
        arrays = {PATCHES: patches(frames, Axis.BAND), POSITIONS: _positions(self.width), _MASK: _mask(n_blocks)}
        return EncoderInput((len(frames),), arrays)

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        step = ClampedPass(_EPS, self._limits)
        x = relu(self._channel_norm(self._first(step, self.n_mel, n_frames), 0))
        x = relu(self._channel_norm(self._second(step, x, "conv2d"), 1))
        x = self._in(step, reshape(x, x.ne[0] * x.ne[1], x.ne[2]), "input_projection")
        for i, layer in enumerate(self._layers):
            x = layer(step, x, str(i))
        if self._out is not None:
            x = self._out(step, x, "output_projection")
        x = rms_norm(x, _EPS)
        if self._norm is not None:
            x = mul(x, self._norm)
        step.graph.output(EMBEDDINGS, self._projection(step, x, "projected"))
        return step.graph

    def _channel_norm(self, x: Tensor, i: int) -> Tensor:
        weight = self._conv_norms[i]
        return x if weight is None else mul(norm(x, _EPS), weight)


class _Attention(NamedTuple):
    """Attention of each frame to itself and the eleven before it, with scores for the distance."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    q_scale: Tensor | None
    k_scale: Tensor | None
    positions: Tensor | None
    n_head: int

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        n_embd, n = x.ne[:2]
        dim, n_blocks = n_embd // self.n_head, -(-n // _BLOCK)

        def scaled(rows: Tensor, factor: float, each: Tensor | None) -> Tensor:
            rows = scale(reshape(rows, dim, self.n_head, n), factor)
            return reshape(rows if each is None else mul(rows, as_f32(each)), n_embd, n)

        def windows(rows: Tensor) -> Tensor:
            """Return the keys or values that each block sees: [dim, n_head, _KEYS, n_blocks]."""
            rows = pad(rows, (0, 0), (_PAST, n_blocks * _BLOCK - n))
            step_bytes = rows.nb[1]
            return view_4d(rows, dim, self.n_head, _KEYS, n_blocks, 4 * dim, step_bytes, _BLOCK * step_bytes)

        q = scaled(self.q(step, x, f"q-{name}"), dim**-0.5 / math.log(2), self.q_scale)
        k = scaled(self.k(step, x, f"k-{name}"), math.log(1 + math.e) / math.log(2), self.k_scale)
        v = self.v(step, x, f"v-{name}")
        q = reshape(pad(q, (0, 0), (0, n_blocks * _BLOCK - n)), dim, self.n_head, _BLOCK, n_blocks)
        q = cont(permute(q, 0, 2, 1, 3))
        scores = mul_mat(cont(permute(windows(k), 0, 2, 1, 3)), q)
        if self.positions is not None:
            distances = mul_mat(self.positions, step.input(POSITIONS, n_embd, _PAST + 1))
            distances = cont(permute(reshape(distances, dim, self.n_head, _PAST + 1), 0, 2, 1, 3))
            by_distance = mul_mat(distances, q)
            # Key s of query q is column s - q; what other columns hold is masked.
            _, nb1, nb2, nb3 = by_distance.nb
            scores = add(scores, view_4d(by_distance, _KEYS, _BLOCK, self.n_head, n_blocks, nb1 - 4, nb2, nb3))
        scores = scale(tanh(scale(scores, 1 / _SOFTCAP)), _SOFTCAP)
        weights = soft_max_ext(scores, step.input(_MASK, _KEYS, _BLOCK, 1, n_blocks), 1.0)
        found = mul_mat(cont(permute(windows(v), 1, 2, 0, 3)), weights)
        found = reshape(cont(permute(found, 0, 2, 1, 3)), n_embd, n_blocks * _BLOCK)
        return self.out(step, view_2d(found, n_embd, n, found.nb[1]), f"attn_out-{name}")


class _Layer(NamedTuple):
    """Half a feed-forward network, attention, convolution, half a network; and a norm, each with RMS norms."""

    before: HalfFeedForward
    attn_norm: RmsNorm | None
    attention: _Attention
    attn_post_norm: RmsNorm | None
    conv_norm: RmsNorm
    conv: ConvModule
    behind: HalfFeedForward
    norm: RmsNorm | None

    @classmethod
    def take(cls, w: RoleWeights, n: int, n_head: int) -> _Layer:
        """Take the weights of a layer. Raises InvalidModel."""

        def optional_norm(*names: str) -> RmsNorm | None:
            found = (w.optional(f"{name}.weight", n) for name in names)
            weight = next((weight for weight in found if weight is not None), None)
            return None if weight is None else RmsNorm(weight)

        dim = n // n_head
        q, k, v, out = (w.linear(f"attn_{name}", n, n) for name in ("q", "k", "v", "out"))
        scales = w.optional("per_dim_scale.weight", dim), w.optional("per_dim_k_scale.weight", dim)
        attention = _Attention(q, k, v, out, *scales, w.optional("attn_k_rel.weight", n, n), n_head)
        # Converters exchange the names of the two norms of the convolution.
        conv = ConvModule(
            w.linear("conv_pw1", n, 2 * n),
            w.require("conv_dw.weight", _KERNEL, n),
            optional_bias(w, "conv_dw", n),
            None,
            None,
            optional_norm("norm_conv"),
            w.linear("conv_pw2", n, n),
            _KERNEL - 1,
            0,
        )
        return cls(
            HalfFeedForward.take(w, n, NormKind.RMS),
            optional_norm("attn_pre_norm", "ln1"),
            attention,
            optional_norm("attn_post_norm"),
            RmsNorm(w.require("conv_norm.weight", n)),
            conv,
            HalfFeedForward.take(w, n, NormKind.RMS, "_1"),
            optional_norm("ln2"),
        )

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        x = self.before(step, x, f"{name}a")
        h = x if self.attn_norm is None else self.attn_norm(step, x, f"attn_norm-{name}")
        h = self.attention(step, h, name)
        if self.attn_post_norm is not None:
            h = self.attn_post_norm(step, h, f"attn_post_norm-{name}")
        x = add(x, h)
        x = add(x, self.conv(step, self.conv_norm(step, x, f"conv_pre_norm-{name}"), name))
        x = self.behind(step, x, f"{name}b")
        return x if self.norm is None else self.norm(step, x, f"ln2-{name}")


def _positions(n_embd: int) -> NDArray[np.float32]:
    """Return sines and, behind them, cosines of the distances 12 … 0: float32 [13, n_embd]."""
    n = n_embd // 2
    frequencies = np.exp(-np.arange(n) * (math.log(10000.0) / max(n - 1, 1)))
    angles = np.arange(_PAST, -1, -1)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _mask(n_blocks: int) -> NDArray[np.float32]:
    """Return the mask of all blocks: float32 [n_blocks, 1, _BLOCK, _KEYS]."""
    block, query, key = np.arange(n_blocks)[:, None, None], np.arange(_BLOCK)[:, None], np.arange(_KEYS) - _PAST
    is_seen = (key <= query) & (query - key < _PAST) & (block * _BLOCK + key >= 0)
    return np.where(is_seen, 0, -np.inf).astype(np.float32)[:, None]
