"""MiMo's encoder of sounds: a tokenizer whose codes a small transformer groups (clip.cpp, models/mimo-audio.cpp)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    Graph,
    add,
    argmax,
    cont,
    get_rows,
    mul_mat,
    pad,
    permute,
    reshape,
    rope_ext,
    scale,
    sqr,
    sub,
    sum_rows,
    swiglu_split,
    transpose,
    unary,
    view_2d,
)
from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput
from llamado.media.errors import MediaError
from llamado.media.mel import MIMO_RATE, mimo_mel
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.parts.rows import as_f32
from llamado.models.encoders.parts.transformer import Activation, EncoderTransformer, Rotate
from llamado.models.encoders.sounds.attention import attend_groups
from llamado.models.encoders.sounds.convolution import Conv1d, halved, plain
from llamado.models.encoders.sounds.encoder import FRAMES, SoundEncoder
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm, RmsNorm
from llamado.models.weights import RoleWeights, Weights

POSITIONS, GROUP_POSITIONS = "positions", "group_positions"
MASK, NEAR_MASK = "mask", "near_mask"
"""Names of inputs: positions in the sound and in groups, and masks of earlier frames, all or those near."""

_THETA, _GROUP_THETA = 10000.0, 640000.0
_SKIP_LAYER = 2
_MOST_POSITIONS = 8192
"""Frames of 20 ms that can see each other; their masks have 128 MiB each."""


class MimoAudioEncoder(SoundEncoder):
    """Frames of 20 ms see those before them; two become codes, and a group of codes a token."""

    begin, end = "<|mimo_audio_start|>", "<|mimo_audio_end|>"

    @property
    def rate(self) -> int:
        return MIMO_RATE

    def _take_weights(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        self.n_mel = keys.int_("num_mel_bins")
        self._transformer = EncoderTransformer(keys, weights, prefix="a", activation=Activation.GELU_ERF)
        n, n_layer = self._transformer.n_embd, len(self._transformer.layers)
        self._norm, self._transformer.post_norm = self._transformer.post_norm, None
        self._is_near = tuple(mode != -1 for mode in keys.ints("wa_pattern_mode"))
        if len(self._is_near) != n_layer or n_layer <= _SKIP_LAYER:
            raise InvalidModel(f"'{keys.name('wa_pattern_mode')}' has {len(self._is_near)} values for {n_layer} layers")
        self.reach = keys.int_("window_size")
        self._convs = (
            Conv1d.take(w, "a.conv1d.1", self.n_mel, n),
            Conv1d.take(w, "a.conv1d.2", n, n, stride=2),
        )
        self._pair = plain(w.require("a.downsample.conv.weight", 2, n, n))
        self._pair_norm = LayerNorm.take(w, "a.downsample.norm", n)
        self._take_codes(w, n)
        self.group = keys.int_("local_group_size")
        self._local = [
            _LocalLayer.take(weights.layer(i, stack="mm.a.local_blk"), n) for i in range(keys.int_("local_block_count"))
        ]
        self._local_norm = RmsNorm(w.require("mm.a.local_norm.weight", n))
        n_hidden, self.n_embd = (w.ne(f"mm.a.mlp.{i}.weight")[1] for i in (1, 2))
        self._up = w.linear("mm.a.mlp.1", n * self.group, n_hidden)
        self._down = w.linear("mm.a.mlp.2", n_hidden, self.n_embd)

    def _take_codes(self, w: RoleWeights, n: int) -> None:
        """Take the codebooks, and the embeddings of their codes. Raises InvalidModel or UnsupportedModel."""
        self._n_codes = self.keys.ints("rvq.codebook_size")
        n_books = self.keys.int_("rvq.num_quantizers")
        most = w.ne("a.rvq.codebook.weight")[1], w.ne("mm.a.code_embd.weight")[1]
        if len(self._n_codes) != n_books or not all(0 < n_codes <= min(most) for n_codes in self._n_codes):
            raise InvalidModel(f"'{self.keys.name('rvq.codebook_size')}' is {list(self._n_codes)}")
        self._books = plain(w.require("a.rvq.codebook.weight", n, most[0], n_books))
        self._code_embeddings = plain(w.require("mm.a.code_embd.weight", n, most[1], n_books))

    def frames(self, samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        found = mimo_mel(samples, self.n_mel)
        n = halved(len(found))
        if n < 2:
            raise MediaError("the sound is too short: this model needs at least 480 samples")
        if n > _MOST_POSITIONS:
            raise MediaError(f"the sound is too long: this model takes {_MOST_POSITIONS // 50} seconds")
        return [found]

    def n_tokens(self, n_frames: int) -> int:
        return -(-(halved(n_frames) // 2) // self.group)

    def encoder_input(self, frames: NDArray[np.float32]) -> EncoderInput:
        n = halved(len(frames))
        ages = np.arange(n)[:, None] - np.arange(n)
        arrays = {
            FRAMES: np.ascontiguousarray(frames),
            POSITIONS: np.arange(n, dtype=np.int32),
            GROUP_POSITIONS: np.tile(np.arange(self.group, dtype=np.int32), self.n_tokens(len(frames))),
        }
        for name in self._masks:
            is_seen = (ages >= 0) if name == MASK else (ages >= 0) & (ages <= self.reach)
            arrays[name] = np.where(is_seen, 0, -np.inf).astype(np.float16)
        return EncoderInput((len(frames),), arrays)

    @property
    def _masks(self) -> set[str]:
        return {NEAR_MASK if is_near else MASK for is_near in self._is_near}

    def build(self, shape: tuple[int, ...]) -> Graph:
        (n_frames,) = shape
        step = EncoderPass(self._transformer.norm_eps)
        x = self.input(step, self.n_mel, n_frames)
        for i, conv in enumerate(self._convs, 1):
            x = unary(conv(step, x, f"conv{i}"), UnaryOp.GELU_ERF)
        x = self._encode(step, x)
        if self._norm is not None:
            x = self._norm(step, x, "post_ln")
        x = self._embed_codes(step, self._codes(self._pairs(step, x)))
        n_padded = -(-x.ne[1] // self.group) * self.group
        x = pad(x, (0, 0), (0, n_padded - x.ne[1]))
        for i, layer in enumerate(self._local):
            x = layer(step, x, self._transformer.n_head, self.group, str(i))
        x = self._local_norm(step, x, "local_norm")
        x = self._up(step, reshape(x, x.ne[0] * self.group, n_padded // self.group), "mlp_up")
        step.graph.output(EMBEDDINGS, self._down(step, unary(x, UnaryOp.GELU_ERF), "mlp_down"))
        return step.graph

    def _encode(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return the output of the layers, and added to it what the third has before its feed-forward network."""
        n = x.ne[1]
        rotate = _rotation(step, POSITIONS, n, _THETA)
        skipped = None
        for i, layer in enumerate(self._transformer.layers):
            mask = step.input(NEAR_MASK if self._is_near[i] else MASK, n, n, type=TensorType.F16)
            h = layer.attention(step, layer.attn_norm(step, x, f"ln1-{i}"), rotate, mask, str(i))
            x = add(h, x)
            if i == _SKIP_LAYER:
                skipped = x
            x = add(x, layer.feed_forward(step, layer.ffn_norm(step, x, f"ln2-{i}"), str(i)))
        assert skipped is not None
        return add(x, skipped)

    def _pairs(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return one row for each two; a last one alone is left out."""
        n = x.ne[0]
        weight = reshape(cont(permute(self._pair, 1, 0, 2, 3)), 2 * n, n)
        x = mul_mat(weight, view_2d(x, 2 * n, x.ne[1] // 2, 2 * x.nb[1]), name="downsample")
        return self._pair_norm(step, unary(x, UnaryOp.GELU_ERF), "downsample_norm")

    def _codes(self, x: Tensor) -> list[Tensor]:
        """Return the codes of each row: the nearest entry of each codebook to what the earlier ones leave."""
        found = []
        for i, n_codes in enumerate(self._n_codes):
            books = self._books
            book = cont(view_2d(books, books.ne[0], n_codes, books.nb[1], i * books.nb[2]))
            rows = as_f32(book)
            sizes = cont(transpose(sum_rows(sqr(rows))))
            codes = argmax(sub(scale(mul_mat(book, x), 2.0), sizes))
            found.append(codes)
            x = sub(x, get_rows(book, codes))
        return found

    def _embed_codes(self, step: EncoderPass, codes: list[Tensor]) -> Tensor:
        """Return the sum of the embeddings of each row's codes."""
        table, found = self._code_embeddings, None
        for i, of_book in enumerate(codes):
            rows = get_rows(view_2d(table, table.ne[0], table.ne[1], table.nb[1], i * table.nb[2]), of_book)
            found = rows if found is None else add(found, rows)
        assert found is not None
        return found


def _rotation(step: EncoderPass, name: str, n: int, theta: float) -> Rotate:
    """Return the rotary positions of whole heads."""
    positions = step.input(name, n, type=TensorType.I32)

    def rotate(x: Tensor) -> Tensor:
        return rope_ext(x, positions, None, x.ne[0], RopeMode.NEOX, 0, theta, 1.0, 0.0, 1.0, 0.0, 0.0, "rotated")

    return rotate


class _LocalLayer(NamedTuple):
    """Layer whose rows see those of their group."""

    attn_norm: RmsNorm
    q: Linear
    k: Linear
    v: Linear
    out: Linear
    ffn_norm: RmsNorm
    gate: Linear
    up: Linear
    down: Linear

    @classmethod
    def take(cls, w: RoleWeights, n: int) -> _LocalLayer:
        """Take the weights of a layer. Raises InvalidModel."""
        n_hidden = w.ne("ffn_up.weight")[1]
        q, k, v, out = (w.linear(f"attn_{name}", n, n) for name in ("q", "k", "v", "out"))
        gate, up = w.linear("ffn_gate", n, n_hidden), w.linear("ffn_up", n, n_hidden)
        norms = (RmsNorm(w.require(f"{name}.weight", n)) for name in ("ln1", "ln2"))
        attn_norm, ffn_norm = norms
        return cls(attn_norm, q, k, v, out, ffn_norm, gate, up, w.linear("ffn_down", n_hidden, n))

    def __call__(self, step: EncoderPass, x: Tensor, n_head: int, n_group: int, name: str) -> Tensor:
        n_embd, n = x.ne[:2]
        dim = n_embd // n_head
        rotate = _rotation(step, GROUP_POSITIONS, n, _GROUP_THETA)
        h = self.attn_norm(step, x, f"local_ln1-{name}")
        q, k, v = (
            reshape(part(step, h, f"local_{which}-{name}"), dim, n_head, n)
            for part, which in ((self.q, "q"), (self.k, "k"), (self.v, "v"))
        )
        q, k, v = (reshape(t, dim, n_head, n_group, n // n_group) for t in (rotate(q), rotate(k), v))
        x = add(x, self.out(step, attend_groups(q, k, v, dim**-0.5), f"local_out-{name}"))
        h = self.ffn_norm(step, x, f"local_ln2-{name}")
        h = swiglu_split(self.gate(step, h, f"local_gate-{name}"), self.up(step, h, f"local_up-{name}"))
        return add(x, self.down(step, h, f"local_down-{name}"))
