"""Encoder of sounds of Granite Speech: a conformer with attention in blocks, and a query transformer in windows
(clip.cpp, models/granite-speech.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    Graph,
    add,
    concat,
    get_rows,
    pad,
    repeat,
    reshape,
    soft_max_ext,
    unary,
    view_2d,
    view_4d,
)
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput
from llamado.media.mel import granite_mel
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.parts.rows import as_f32
from llamado.models.encoders.parts.transformer import NormKind
from llamado.models.encoders.sounds.attention import attend_groups
from llamado.models.encoders.sounds.conformer import ConvModule, HalfFeedForward
from llamado.models.encoders.sounds.encoder import FRAMES, SoundEncoder
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights

DISTANCES = "distances"
"""Name of the input: rows of the tables of distances, from the largest distance to the smallest."""

_PROJECTOR_EPS = 1e-12
_PROJECTOR_LAYERS = 2
_MOST_SCORES = 2**24


class GraniteSpeechEncoder(SoundEncoder):
    """Frames of 20 ms; three tokens, or as the file has it, for each window of 15."""

    def _take_weights(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        self.n_bins = keys.int_("num_mel_bins")
        if self.n_bins % 2:
            raise InvalidModel(f"'{keys.name('num_mel_bins')}' is {self.n_bins}; an even number is expected")
        self.norm_eps = keys.float_("attention.layer_norm_epsilon")
        n, n_head = keys.int_("embedding_length"), keys.int_("attention.head_count")
        if n % n_head:
            raise InvalidModel(f"{n_head} heads do not share a width of {n} evenly")
        self.n_block, self.n_far = keys.int_("chunk_size"), keys.int_("max_pos_emb")
        if self.n_far < self.n_block - 1:
            raise InvalidModel(f"positions to {self.n_far} are too few for blocks of {self.n_block} frames")
        self._in = w.linear("a.input_projection", self.n_bins, n)
        n_layer, n_kernel = keys.int_("block_count"), keys.int_("conv_kernel_size")
        self._layers = [
            _Layer.take(weights.layer(i, stack="a.blk"), n, n_head, n_kernel, self.n_far + self.n_block)
            for i in range(n_layer)
        ]
        self._middle = n_layer // 2
        n_labels = w.ne("a.enc_ctc_out.weight")[1]
        self._labels = w.linear("a.enc_ctc_out", n, n_labels)
        self._of_labels = w.linear("a.enc_ctc_out_mid", n_labels, n)
        self._features = set(keys.ints("feature_layer"))
        if not self._features <= set(range(n_layer + 1)):
            raise InvalidModel(f"'{keys.name('feature_layer')}' names layers that are not among 0 to {n_layer}")
        n_features = n * (len(self._features) + 1)
        self.n_window = keys.int_("projector.window_size")
        self.n_queries = self.n_window // keys.int_("projector.downsample_rate")
        if not self.n_queries:
            raise InvalidModel(f"'{keys.name('projector.downsample_rate')}' exceeds the window, {self.n_window}")
        self._projector = _Projector(weights, n, n_features, self.n_queries, keys.int_("projector.head_count"))
        self.n_embd = self._projector.n_out

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        return [granite_mel(samples, self.n_bins)]

    def n_tokens(self, n_frames: int) -> int:
        return -(-n_frames // self.n_window) * self.n_queries

    def encoder_input(self, frames: NDArray[np.float32]) -> EncoderInput:
        distances = self.n_far + np.arange(self.n_block - 1, -self.n_block, -1)
        arrays = {FRAMES: np.ascontiguousarray(frames), DISTANCES: distances.astype(np.int32)}
        return EncoderInput((len(frames),), arrays)

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        step = EncoderPass(self.norm_eps)
        x = self._in(step, self.input(step, self.n_bins, n_frames), "input_projection")
        features = [x] if 0 in self._features else []
        for i, layer in enumerate(self._layers, 1):
            x = layer(step, x, self.n_block, str(i - 1))
            if i in self._features:
                features.append(x)
            if i == self._middle:
                labels = soft_max_ext(self._labels(step, x, "ctc_out"), None, 1.0)
                x = add(x, self._of_labels(step, labels, "ctc_out_mid"))
        for feature in reversed(features):
            x = concat(feature, x, 0)
        n_windows = -(-n_frames // self.n_window)
        x = pad(x, (0, 0), (0, n_windows * self.n_window - n_frames))
        found = self._projector(step, reshape(x, x.ne[0], self.n_window, n_windows))
        step.graph.output(EMBEDDINGS, found)
        return step.graph


class _BlockAttention(NamedTuple):
    """Attention within blocks of frames, with scores for the distance (arXiv 1803.02155)."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    distances: Tensor
    n_head: int

    def __call__(self, step: EncoderPass, x: Tensor, n_block: int, name: str) -> Tensor:
        n_embd, n = x.ne[:2]
        dim = n_embd // self.n_head
        q, k, v = (part(step, x, f"{which}-{name}") for part, which in ((self.q, "q"), (self.k, "k"), (self.v, "v")))
        distances = get_rows(self.distances, step.input(DISTANCES, 2 * n_block - 1, type=TensorType.I32))
        found = None
        for first, size, n_blocks in _groups(n, n_block, self.n_head):
            # A block behind the last whole one is shorter.
            nearest = view_2d(distances, dim, 2 * size - 1, distances.nb[1], (n_block - size) * distances.nb[1])
            queries, keys, values = (
                view_4d(t, dim, self.n_head, size, n_blocks, 4 * dim, t.nb[1], size * t.nb[1], first * t.nb[1])
                for t in (q, k, v)
            )
            part = attend_groups(queries, keys, values, dim**-0.5, nearest)
            found = part if found is None else concat(found, part, 1)
        assert found is not None
        return self.out(step, found, f"attn_out-{name}")


def _groups(n: int, n_block: int, n_head: int) -> Iterator[tuple[int, int, int]]:
    """Yield first frame, size and number of blocks that are computed at once, for `n` frames."""
    n_whole, n_rest = divmod(n, n_block)
    n_most = max(1, _MOST_SCORES // (n_block * n_block * n_head))
    for at in range(0, n_whole, n_most):
        yield at * n_block, n_block, min(n_most, n_whole - at)
    if n_rest:
        yield n_whole * n_block, n_rest, 1


class _Layer(NamedTuple):
    """Half a feed-forward network, attention, convolution, half a network, each behind a norm; and a norm."""

    before: HalfFeedForward
    attn_norm: LayerNorm
    attention: _BlockAttention
    conv_norm: LayerNorm
    conv: ConvModule
    behind: HalfFeedForward
    norm: LayerNorm

    @classmethod
    def take(cls, w: RoleWeights, n: int, n_head: int, n_kernel: int, n_distances: int) -> _Layer:
        """Take the weights of a layer. Raises InvalidModel."""
        found = w.ne("attn_rel_pos_emb")[1]
        if found < n_distances:
            raise InvalidModel(f"'attn_rel_pos_emb' has {found} rows; at least {n_distances} are expected")
        q, k, v, out = (w.linear(f"attn_{name}", n, n) for name in ("q", "k", "v", "out"))
        attention = _BlockAttention(q, k, v, out, w.require("attn_rel_pos_emb", n // n_head, found), n_head)
        conv = ConvModule(
            w.linear("conv_pw1", n, 2 * n),
            w.require("conv_dw.weight", n_kernel, n),
            None,
            w.require("conv_norm.weight", n),
            w.require("conv_norm.bias", n),
            None,
            w.linear("conv_pw2", n, n),
            n_kernel // 2,
            n_kernel // 2,
        )
        return cls(
            HalfFeedForward.take(w, n, NormKind.LAYER),
            LayerNorm.take(w, "ln1", n),
            attention,
            LayerNorm.take(w, "norm_conv", n),
            conv,
            HalfFeedForward.take(w, n, NormKind.LAYER, "_1"),
            LayerNorm.take(w, "ln2", n),
        )

    def __call__(self, step: EncoderPass, x: Tensor, n_block: int, name: str) -> Tensor:
        x = self.before(step, x, f"{name}a")
        x = add(x, self.attention(step, self.attn_norm(step, x, f"ln1-{name}"), n_block, name))
        x = add(x, self.conv(step, self.conv_norm(step, x, f"norm_conv-{name}"), name))
        return self.norm(step, self.behind(step, x, f"{name}b"), f"ln2-{name}")


class _CrossAttention(NamedTuple):
    """Attention of the queries of each window to others or to its frames, and the norm behind it."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    norm: LayerNorm

    @classmethod
    def take(cls, w: RoleWeights, name: str, n: int, n_seen: int) -> _CrossAttention:
        """Take the weights. Raises InvalidModel."""
        return cls(
            w.linear(f"{name}_q", n, n),
            w.linear(f"{name}_k", n_seen, n),
            w.linear(f"{name}_v", n_seen, n),
            w.linear(f"{name}_out", n, n),
            LayerNorm.take(w, f"{name}_norm", n),
        )

    def __call__(self, step: EncoderPass, queries: Tensor, seen: Tensor, n_head: int, name: str) -> Tensor:
        n, n_queries, n_windows = queries.ne[:3]
        dim = n // n_head

        def heads(part: Linear, x: Tensor, which: str) -> Tensor:
            rows = part(step, x, f"{which}-{name}")
            return reshape(rows, dim, n_head, x.ne[1], n_windows)

        found = attend_groups(
            heads(self.q, queries, "q"), heads(self.k, seen, "k"), heads(self.v, seen, "v"), 1 / math.sqrt(dim)
        )
        found = self.out(step, reshape(found, n, n_queries, n_windows), f"out-{name}")
        return self.norm(step, add(found, queries), f"norm-{name}")


class _Projector:
    """Query transformer (BLIP-2, arXiv 2301.12597): the same queries in each window of frames."""

    def __init__(self, weights: Weights, n: int, n_seen: int, n_queries: int, n_head: int) -> None:
        """Take the weights. Raises InvalidModel."""
        if n % n_head:
            raise InvalidModel(f"{n_head} heads of the projector do not share a width of {n} evenly")
        w = weights.shared
        self._n_head = n_head
        self._queries = w.require("a.proj_query", n, n_queries)
        self._norm = LayerNorm.take(w, "a.proj_norm", n)
        self.n_out = w.ne("a.proj_linear.weight")[1]
        self._out = w.linear("a.proj_linear", n, self.n_out)
        self._layers = []
        for i in range(_PROJECTOR_LAYERS):
            layer = weights.layer(i, stack="a.proj_blk")
            n_hidden = layer.ne("ffn_up.weight")[1]
            self._layers.append(
                (
                    _CrossAttention.take(layer, "self_attn", n, n),
                    _CrossAttention.take(layer, "cross_attn", n, n_seen),
                    layer.linear("ffn_up", n, n_hidden),
                    layer.linear("ffn_down", n_hidden, n),
                    LayerNorm.take(layer, "ffn_norm", n),
                )
            )

    def __call__(self, outer: EncoderPass, frames: Tensor) -> Tensor:
        """Return the embeddings: F32 [n_out, n_queries · n_windows], of frames [n_seen, n_window, n_windows]."""
        step = _within(outer)
        n_windows = frames.ne[2]
        queries = self._norm(step, as_f32(self._queries), "proj_norm")
        n, n_queries = queries.ne[:2]
        queries = repeat(queries, n, n_queries, n_windows)
        for i, (to_queries, to_frames, up, down, norm_behind) in enumerate(self._layers):
            queries = to_queries(step, queries, queries, self._n_head, f"self-{i}")
            queries = to_frames(step, queries, frames, self._n_head, f"cross-{i}")
            h = down(step, unary(up(step, queries, f"up-{i}"), UnaryOp.GELU), f"down-{i}")
            queries = norm_behind(step, add(h, queries), f"ffn_norm-{i}")
        return self._out(step, reshape(queries, n, n_queries * n_windows), "proj_linear")


def _within(outer: EncoderPass) -> EncoderPass:
    """Return a pass that adds to the same graph, with the projector's epsilon."""
    step = EncoderPass(_PROJECTOR_EPS)
    step.graph = outer.graph
    return step
