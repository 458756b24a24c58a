"""Parts of conformers (arXiv 2005.08100): subsampling, attention with relative positions, convolution of frames."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    add,
    concat,
    cont,
    mul,
    mul_mat,
    pad,
    permute,
    relu,
    reshape,
    scale,
    sigmoid,
    silu,
    soft_max_ext,
    ssm_conv,
    transpose,
    view_2d,
    view_3d,
)
from llamado.ggml.tensor import Tensor
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.rows import as_f32
from llamado.models.encoders.parts.transformer import NormKind, take_norm
from llamado.models.encoders.sounds.convolution import (
    DepthwiseConv2d,
    FirstConv2d,
    bias_of,
    eighth,
    flat,
    plain,
)
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm, RmsNorm
from llamado.models.weights import RoleWeights

POSITIONS, BAND = "positions", "band"
"""Names of inputs: relative positions, from the largest distance to the smallest, and the mask of a window."""

_MOST_SCORES = 2**24


class Subsampler(NamedTuple):
    """Convolutions that leave an eighth of frames and bands, and a matrix (FastConformer, arXiv 2305.05084)."""

    first: FirstConv2d
    depthwise: tuple[DepthwiseConv2d, DepthwiseConv2d]
    pointwise: tuple[Linear, Linear]
    out: Linear

    @classmethod
    def take(cls, w: RoleWeights, n_bands: int, n_embd: int) -> Subsampler:
        """Take the weights `a.conv1d.N` and `a.pre_encode.out`. Raises InvalidModel or UnsupportedModel."""
        first = FirstConv2d.take(w, "a.conv1d.0")
        n = first.weight.ne[3]

        def pointwise(i: int) -> Linear:
            weight = plain(w.require(f"a.conv1d.{i}.weight", 1, 1, n, n))
            return Linear(weight, bias_of(w, f"a.conv1d.{i}", n))

        depthwise = DepthwiseConv2d.take(w, "a.conv1d.2", n), DepthwiseConv2d.take(w, "a.conv1d.5", n)
        out = w.linear("a.pre_encode.out", n * eighth(n_bands), n_embd)
        return cls(first, depthwise, (pointwise(3), pointwise(6)), out)

    def __call__(self, step: EncoderPass, n_bands: int, n_frames: int) -> Tensor:
        """Return F32 [n_embd, eighth(n_frames)]."""
        x = relu(self.first(step, n_bands, n_frames))
        for i, (depthwise, pointwise) in enumerate(zip(self.depthwise, self.pointwise, strict=True)):
            x = depthwise(step, x, f"depthwise-{i}")
            weight, n = pointwise.weight, x.ne[0]
            assert pointwise.bias is not None
            x = relu(add(mul_mat(reshape(weight, n, n), x, name=f"pointwise-{i}"), flat(pointwise.bias)))
        # Rows of the matrix go through the bands first.
        n_channels, n_bands, n_frames, _ = x.ne
        x = reshape(cont(permute(x, 1, 0, 2, 3)), n_bands * n_channels, n_frames)
        return self.out(step, x, "subsampled")


class RelativeAttention(NamedTuple):
    """Attention of all frames to all, with scores for their distance (Transformer-XL, arXiv 1901.02860)."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    positions: Tensor
    content_bias: Tensor
    position_bias: Tensor
    n_head: int

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, n_head: int) -> RelativeAttention:
        """Take the weights of a layer. Raises InvalidModel."""
        dim = n_embd // n_head
        q, k, v, out = (w.linear(f"attn_{name}", n_embd, n_embd) for name in ("q", "k", "v", "out"))
        biases = w.require("pos_bias_u", dim, n_head), w.require("pos_bias_v", dim, n_head)
        return cls(q, k, v, out, w.require("linear_pos.weight", n_embd, n_embd), *biases, n_head)

    def __call__(self, step: EncoderPass, x: Tensor, window: Window, name: str) -> Tensor:
        n_embd, n = x.ne[:2]
        dim = n_embd // self.n_head

        def heads(rows: Tensor) -> Tensor:
            """Return [dim, n, n_head] of [n_embd, n]."""
            return cont(permute(reshape(rows, dim, self.n_head, rows.ne[1]), 0, 2, 1, 3))

        q = reshape(self.q(step, x, f"q-{name}"), dim, self.n_head, n)
        content, position = (cont(permute(add(q, bias), 0, 2, 1, 3)) for bias in self._biases)
        k = heads(self.k(step, x, f"k-{name}"))
        v = cont(permute(reshape(self.v(step, x, f"v-{name}"), dim, self.n_head, n), 1, 2, 0, 3))
        distances = heads(step.mul_mat(self.positions, window.positions(step, n_embd), f"positions-{name}"))
        found = None
        for block in window.blocks():
            scores = mul_mat(_rows(k, block.keys), _rows(content, block.queries))
            by_distance = mul_mat(_rows(distances, window.distances(block)), _rows(position, block.queries))
            scores = add(scores, by_key(by_distance, len(block.keys)))
            weights = soft_max_ext(scores, window.mask(step, block), 1 / math.sqrt(dim))
            values = view_3d(v, len(block.keys), dim, self.n_head, v.nb[1], v.nb[2], 4 * block.keys.start)
            part = cont(permute(mul_mat(cont(values), weights), 0, 2, 1, 3))
            part = reshape(part, n_embd, len(block.queries))
            found = part if found is None else concat(found, part, 1)
        assert found is not None
        return self.out(step, found, f"attn_out-{name}")

    @property
    def _biases(self) -> tuple[Tensor, Tensor]:
        return as_f32(self.content_bias), as_f32(self.position_bias)


class Block(NamedTuple):
    """Queries that attend to the same keys."""

    queries: range
    keys: range


class Window(NamedTuple):
    """Attention of `n` frames to those at most `reach` away, or to all if it is None, in blocks of `n_block` queries.

    Scores of one block at a time are in memory.
    """

    n: int
    n_block: int
    reach: int | None = None

    @classmethod
    def of(cls, n: int, n_head: int, reach: int | None = None) -> Window:
        """Return a window whose blocks have at most about _MOST_SCORES scores."""
        n_keys = n if reach is None else min(n, 4 * reach)
        return cls(n, min(n, max(1, _MOST_SCORES // (n_keys * n_head)), n if reach is None else 2 * reach), reach)

    @property
    def n_distances(self) -> int:
        """One more than the largest distance of a query from a key of its block."""
        return self.n if self.reach is None else self.n_block + self.reach

    def blocks(self) -> Iterator[Block]:
        """Yield all blocks."""
        for first in range(0, self.n, self.n_block):
            stop = min(first + self.n_block, self.n)
            reach = self.n if self.reach is None else self.reach
            yield Block(range(first, stop), range(max(0, first - reach), min(self.n, stop + reach)))

    def positions(self, step: EncoderPass, n_embd: int) -> Tensor:
        """Return the input of relative positions: F32 [n_embd, 2 · n_distances − 1]."""
        return step.input(POSITIONS, n_embd, 2 * self.n_distances - 1)

    def distances(self, block: Block) -> range:
        """Return the rows of positions from the last query and first key to the first query and last key."""
        first = self.n_distances - block.queries.stop + block.keys.start
        return range(first, first + len(block.queries) + len(block.keys) - 1)

    def mask(self, step: EncoderPass, block: Block) -> Tensor | None:
        """Return the mask of a block's scores: F32 [n_keys, n_queries]; None if all count."""
        if self.reach is None:
            return None
        band = step.input(BAND, self.n_block + 2 * self.reach, self.n_block)
        at = block.keys.start - block.queries.start + self.reach
        return cont(view_2d(band, len(block.keys), len(block.queries), band.nb[1], 4 * at))

    def arrays(self, n_embd: int) -> dict[str, NDArray[np.float32]]:
        """Return the contents of the inputs."""
        found = {POSITIONS: relative_positions(self.n_distances, n_embd)}
        if self.reach is not None:
            key, query = np.arange(self.n_block + 2 * self.reach), np.arange(self.n_block)[:, None]
            is_near = np.abs(key - self.reach - query) <= self.reach
            found[BAND] = np.where(is_near, 0, -np.inf).astype(np.float32)
        return found


def by_key(scores: Tensor, n_keys: int) -> Tensor:
    """Return scores by key, [n_keys, n, n_head], of scores by distance, [n + n_keys − 1, n, n_head].

    The distance of query q and key k is column n − 1 − q + k: one column earlier in each row.
    """
    n, n_head = scores.ne[1], scores.ne[2]
    return view_3d(scores, n_keys, n, n_head, scores.nb[1] - 4, scores.nb[2], 4 * (n - 1))


def _rows(x: Tensor, rows: range) -> Tensor:
    """Return rows of [n0, n, n_head]."""
    return view_3d(x, x.ne[0], len(rows), x.ne[2], x.nb[1], x.nb[2], rows.start * x.nb[1])


def relative_positions(n: int, n_embd: int) -> NDArray[np.float32]:
    """Return sines and cosines, alternating, of the distances n − 1 … 1 − n: float32 [2 · n − 1, n_embd]."""
    frequencies = np.exp(-math.log(10000.0) / n_embd * 2.0 * np.arange(n_embd // 2))
    angles = np.arange(n - 1, -n, -1)[:, None] * frequencies
    return np.stack([np.sin(angles), np.cos(angles)], axis=2).reshape(2 * n - 1, n_embd).astype(np.float32)


class ConvModule(NamedTuple):
    """Gated convolution of each channel over neighboring frames, between two matrices.

    `scale` and `shift`: batch norm behind the convolution, if there is one; `norm`: RMS norm in its place.
    `n_before` are the frames of zeros before the first; as many follow unless `is_causal`.
    """

    up: Linear
    kernel: Tensor
    bias: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    norm: RmsNorm | None
    down: Linear
    n_before: int
    n_behind: int

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        rows = self.up(step, x, f"conv_up-{name}")
        n = rows.ne[0] // 2
        values, gate = (view_2d(rows, n, rows.ne[1], rows.nb[1], 4 * n * i) for i in (0, 1))
        x = cont(transpose(mul(values, sigmoid(gate))))
        x = ssm_conv(pad(x, (self.n_before, self.n_behind)), as_f32(self.kernel), f"conv-{name}")
        if self.bias is not None:
            x = add(x, flat(self.bias))
        if self.scale is not None:
            x = mul(x, flat(self.scale))
        if self.shift is not None:
            x = add(x, flat(self.shift))
        if self.norm is not None:
            x = self.norm(step, x, f"conv_norm-{name}")
        return self.down(step, silu(x), f"conv_down-{name}")


class HalfFeedForward(NamedTuple):
    """Feed-forward network with SiLU, of whose result a half is added."""

    norm: LayerNorm | RmsNorm
    up: Linear
    down: Linear
    post_norm: LayerNorm | RmsNorm | None = None

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, kind: NormKind, suffix: str = "") -> HalfFeedForward:
        """Take the network whose tensors end with `suffix`. Raises InvalidModel."""
        n = w.ne(f"ffn_up{suffix}.weight")[1]
        post = f"ffn_post_norm{suffix}"
        return cls(
            take_norm(w, f"ffn_norm{suffix}", n_embd, kind),
            w.linear(f"ffn_up{suffix}", n_embd, n),
            w.linear(f"ffn_down{suffix}", n, n_embd),
            take_norm(w, post, n_embd, kind) if w.has(f"{post}.weight") else None,
        )

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        h = silu(self.up(step, self.norm(step, x, f"ffn_norm-{name}"), f"ffn_up-{name}"))
        h = self.down(step, h, f"ffn_down-{name}")
        if self.post_norm is not None:
            h = self.post_norm(step, h, f"ffn_post_norm-{name}")
        return add(x, scale(h, 0.5), f"ffn_out-{name}")


class ConformerLayer(NamedTuple):
    """Half a feed-forward network, attention, convolution, half a network, each behind a norm; and a norm."""

    before: HalfFeedForward
    attn_norm: LayerNorm
    attention: RelativeAttention
    conv_norm: LayerNorm
    conv: ConvModule
    behind: HalfFeedForward
    norm: LayerNorm

    @classmethod
    def take(cls, w: RoleWeights, n_embd: int, n_head: int, conv: ConvModule) -> ConformerLayer:
        """Take the weights of a layer, but for its convolution. Raises InvalidModel."""
        return cls(
            HalfFeedForward.take(w, n_embd, NormKind.LAYER),
            LayerNorm.take(w, "ln1", n_embd),
            RelativeAttention.take(w, n_embd, n_head),
            LayerNorm.take(w, "norm_conv", n_embd),
            conv,
            HalfFeedForward.take(w, n_embd, NormKind.LAYER, "_1"),
            LayerNorm.take(w, "ln2", n_embd),
        )

    def __call__(self, step: EncoderPass, x: Tensor, window: Window, name: str) -> Tensor:
        x = self.before(step, x, f"{name}a")
        x = add(x, self.attention(step, self.attn_norm(step, x, f"ln1-{name}"), window, name))
        x = add(x, self.conv(step, self.conv_norm(step, x, f"norm_conv-{name}"), name))
        return self.norm(step, self.behind(step, x, f"{name}b"), f"ln2-{name}")
