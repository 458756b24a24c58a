"""MiniCPM-V 4.6: SigLIP that merges patches after some layers, and merges the results once more."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import add, gelu, reshape, unary
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import EncoderInput
from llamado.media.media import Media
from llamado.media.preprocessing import PreparedPicture
from llamado.media.tiling import minicpmv
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.patches import ORDER, add_positions
from llamado.models.encoders.parts.rows import mean_of_groups
from llamado.models.encoders.parts.transformer import EncoderAttention, NormKind, attend, take_norm
from llamado.models.encoders.pictures import Pixels, VitEncoder, join
from llamado.models.encoders.tiled.minicpmv import SLICES, TABLE_SIDE, buckets
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm, RmsNorm
from llamado.models.weights import Weights

WINDOW = 4
"""Patches in a square of 2 × 2."""


class WindowMerger(NamedTuple):
    """Attention within squares of 2 × 2 patches, and a network that merges each square to one row."""

    norm: LayerNorm | RmsNorm
    attention: EncoderAttention
    merge_norm: LayerNorm | RmsNorm
    up: Linear
    down: Linear

    @classmethod
    def take(cls, weights: Weights, attention: EncoderAttention, n: int) -> WindowMerger:
        """Take the merger, whose heads are those of the layers' `attention`. Raises InvalidModel."""
        w, name = weights.shared, "v.vit_merger"
        n_ff = weights.ne(f"{name}.ds_ffn_up.weight")[1]
        q, k, v, out = (w.linear(f"{name}.attn_{part}", n, n) for part in ("q", "k", "v", "out"))
        return cls(
            norm=take_norm(w, f"{name}.ln1", n, NormKind.LAYER),
            attention=attention._replace(qkv=None, q=q, k=k, v=v, out=out, q_norm=None, k_norm=None, sinks=None),
            merge_norm=take_norm(w, f"{name}.ds_ln", WINDOW * n, NormKind.LAYER),
            up=w.linear(f"{name}.ds_ffn_up", WINDOW * n, n_ff),
            down=w.linear(f"{name}.ds_ffn_down", n_ff, n),
        )

    def __call__(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return F32 [n_embd, n / 4] for rows of which each 4 are a square."""
        attention, h = self.attention, self.norm(step, x, "vit_merger_ln1")
        assert attention.q is not None and attention.k is not None and attention.v is not None
        q, k, v = (
            reshape(part(step, h, f"vit_merger_{name}"), attention.head_dim, n_head, WINDOW, x.ne[1] // WINDOW)
            for part, name, n_head in (
                (attention.q, "q", attention.n_head),
                (attention.k, "k", attention.n_head),
                (attention.v, "v", attention.n_head),
            )
        )
        x = add(attention.out(step, attend(q, k, v, attention.scale), "vit_merger_out"), x, "vit_merger_attention")
        h = self.merge_norm(step, join(x, WINDOW), "vit_merger_ds_ln")
        h = self.down(step, gelu(self.up(step, h, "vit_merger_up")), "vit_merger_down")
        return add(h, mean_of_groups(x, WINDOW), "vit_merger")


class MiniCpmV46Encoder(VitEncoder):
    """Each token is a square of 4 × 4 patches, or of 2 × 2 without a merger between layers."""

    texts = SLICES

    def preprocess(self, media: Media) -> PreparedPicture:
        return minicpmv(media, self.options)

    def _take_projector(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        self.merge = keys.int_("projector.scale_factor", 4)
        if self.merge not in (2, 4):
            raise UnsupportedModel(f"'{keys.name('projector.scale_factor')}' is {self.merge}; 2 and 4 are supported")
        self.require_squares()
        self.require_positions(TABLE_SIDE**2)
        layers, n = self.transformer.layers, self.transformer.n_embd
        merger_at = next(iter(keys.ints("wa_layer_indexes")), 0)
        if not 0 <= merger_at < len(layers):
            raise InvalidModel(f"'{keys.name('wa_layer_indexes')}': there is no layer {merger_at} of {len(layers)}")
        self._n_before = merger_at + 1
        self._merger = WindowMerger.take(weights, layers[0].attention, n) if self.merge == 4 else None
        n_ff, self.n_embd = weights.ne("mm.up.weight")[1], weights.ne("mm.down.weight")[1]
        self._norm = take_norm(w, "mm.input_norm", WINDOW * n, NormKind.LAYER)
        self._up, self._down = w.linear("mm.up", WINDOW * n, n_ff), w.linear("mm.down", n_ff, self.n_embd)

    def order(self, nx: int, ny: int) -> NDArray[np.int32]:
        """Squares of 4 × 4 are four squares of 2 × 2."""
        order = super().order(nx, ny)
        if self.merge == 2:
            return order
        return order.reshape(-1, 2, 2, 2, 2).transpose(0, 1, 3, 2, 4).reshape(-1)

    def input(self, pixels: Pixels) -> EncoderInput:
        given = super().input(pixels)
        height, width, _ = pixels.shape
        nx, ny = width // self.patch, height // self.patch
        rows, columns = np.divmod(given.arrays[ORDER], np.int32(nx))
        order = buckets(rows, ny) * np.int32(TABLE_SIDE) + buckets(columns, nx)
        return EncoderInput(given.shape, {**given.arrays, ORDER: order})

    def encode(self, step: EncoderPass, shape: tuple[int, ...]) -> Tensor:
        transformer = self.transformer
        x = add_positions(step, self.patches(step, shape[0]), self.table)
        if transformer.pre_norm is not None:
            x = transformer.pre_norm(step, x, "pre_ln")
        for i, layer in enumerate(transformer.layers):
            x = layer(step, x, None, None, str(i))
            if self._merger is not None and i + 1 == self._n_before:
                x = self._merger(step, x)
        return x if transformer.post_norm is None else transformer.post_norm(step, x, "post_ln")

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = self._norm(step, join(x, WINDOW), "merger_norm")
        return self._down(step, unary(self._up(step, x, "merger_up"), UnaryOp.GELU_ERF), "merger_down")
