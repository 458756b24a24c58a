"""SAM's encoder (arXiv 2304.02643) with the neck of DeepEncoder (arXiv 2510.18234), as in DeepSeek-OCR.

Attention is within windows, in some layers of the whole picture, and adds a learned bias for the distances of columns
and of rows. The bias of a query is linear in one-hot vectors of the key's column and row: they are appended to the
keys, and the biases to the queries, so that attention needs no mask of all pairs (clip.cpp, models/deepseekocr.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    add,
    cast,
    concat,
    cont,
    flash_attn_ext,
    get_rows,
    mul_mat,
    permute,
    repeat,
    reshape,
    scale,
    transpose,
    view_4d,
)
from llamado.ggml.ops import PrecType
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.keys import EncoderKeys
from llamado.models.encoders.parts.grid_convolution import Convolution, Kernel, gather
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import PatchEmbedding
from llamado.models.encoders.parts.rows import as_f32
from llamado.models.encoders.parts.transformer import Activation, EncoderFeedForward
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights

PATCH, SHRINK = 16, 4
"""Pixels of a side of a patch, and patches of a side that become one row of the result."""
EPS = 1e-6
_GLOBAL = 2, 5, 8, 11
_SHRINKING = Kernel(3, stride=2, before=1, after=1)
_KEEPING = Kernel(3, before=1, after=1)


class Area(NamedTuple):
    """Squares of `side` × `side` places that attend to each other, `n` of them; `name` begins their inputs' names."""

    name: str
    side: int
    n: int

    @property
    def n_rows(self) -> int:
        """Biases for the rows: one for each, and unused ones that make the length of a head divisible by 8."""
        return self.side + -2 * self.side % 8

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the inputs that `distances` and `places` read."""
        at, n = np.arange(self.side), self.n_rows
        distances = np.zeros((self.side, n), np.int32)
        distances[:, : self.side] = at[:, None] - at[None, :] + self.side - 1
        places = np.zeros((self.side, self.side, self.side + n), np.float32)
        places[:, at, at] = 1
        places[at, :, self.side + at] = 1
        return {
            f"{self.name}_columns": distances[:, : self.side].copy(),
            f"{self.name}_rows": distances,
            f"{self.name}_places": places,
        }

    def distances(self, step: EncoderPass, axis: str) -> Tensor:
        """Return the rows of the table of biases for all keys and queries of an axis."""
        n = self.side if axis == "columns" else self.n_rows
        return step.input(f"{self.name}_{axis}", n * self.side, type=TensorType.I32)

    def places(self, step: EncoderPass) -> Tensor:
        """Return the one-hot vectors of the columns and rows of all places."""
        return step.input(f"{self.name}_places", self.side + self.n_rows, self.side**2)


class SamAttention(NamedTuple):
    """Attention with learned biases for the distance of columns and rows."""

    qkv: Linear
    out: Linear
    columns: Tensor
    rows: Tensor
    n_head: int

    def __call__(self, step: EncoderPass, x: Tensor, area: Area, name: str) -> Tensor:
        n, side, heads = x.ne[0], area.side, self.n_head
        dim, n_places = n // heads, side * side
        fused = self.qkv(step, x, f"sam_qkv-{name}")

        def part(i: int) -> Tensor:
            """Return queries, keys or values: [dim, places, heads, areas]."""
            row = fused.nb[1]
            found = view_4d(fused, dim, heads, n_places, area.n, 4 * dim, row, n_places * row, 4 * n * i)
            return permute(found, 0, 2, 1, 3)

        q, k, v = cont(part(0)), cont(part(1)), part(2)
        grid = reshape(q, dim, side, side, heads * area.n)
        by_column = mul_mat(self._biases(step, self.columns, area, "columns"), cont(permute(grid, 0, 2, 1, 3)))
        by_column = reshape(cont(permute(by_column, 0, 2, 1, 3)), side, n_places, heads, area.n)
        by_row = mul_mat(self._biases(step, self.rows, area, "rows"), grid)
        by_row = reshape(by_row, area.n_rows, n_places, heads, area.n)
        q = concat(concat(scale(q, dim**-0.5), by_column, 0), by_row, 0)
        places = area.places(step)
        k = concat(k, repeat(places, places.ne[0], n_places, heads, area.n), 0)
        k, v = cast(k, TensorType.F16), cast(v, TensorType.F16)
        found = flash_attn_ext(q, k, v, None, 1.0, precision=PrecType.F32)
        return self.out(step, reshape(found, n, n_places * area.n), f"sam_attn_out-{name}")

    def _biases(self, step: EncoderPass, table: Tensor, area: Area, axis: str) -> Tensor:
        """Return the weights of the biases of an axis: F32 [dim, keys, queries]."""
        dim, n = table.ne[:2]
        if n != 2 * area.side - 1:
            weights = step.input(f"{area.name}_{axis}_weights", n, 2 * area.side - 1)
            table = mul_mat(cont(transpose(as_f32(table))), weights)
        ids = area.distances(step, axis)
        return reshape(get_rows(table, ids), dim, ids.ne[0] // area.side, area.side)

    def arrays(self, area: Area) -> dict[str, NDArray[np.float32]]:
        """Return the weights that fit tables of other lengths to an area."""
        n = 2 * area.side - 1
        return {
            f"{area.name}_{axis}_weights": Interpolation.BILINEAR.weights(table.ne[1], n)
            for axis, table in (("columns", self.columns), ("rows", self.rows))
            if table.ne[1] != n
        }


class SamLayer(NamedTuple):
    """One layer."""

    attn_norm: LayerNorm
    attention: SamAttention
    ffn_norm: LayerNorm
    feed_forward: EncoderFeedForward

    @classmethod
    def take(cls, w: RoleWeights, n: int, n_head: int, activation: Activation) -> SamLayer:
        """Take the weights of a layer. Raises InvalidModel."""
        dim, n_ff = n // n_head, w.ne("mlp.lin1.weight")[1]
        columns, rows = (w.require(f"attn.pos_{axis}.weight", dim, w.ne(f"attn.pos_{axis}.weight")[1]) for axis in "wh")
        up, down = w.linear("mlp.lin1", n, n_ff), w.linear("mlp.lin2", n_ff, n)
        return cls(
            LayerNorm.take(w, "pre_ln", n),
            SamAttention(w.linear("attn.qkv", n, 3 * n), w.linear("attn.out", n, n), columns, rows, n_head),
            LayerNorm.take(w, "post_ln", n),
            EncoderFeedForward(up, down, None, activation),
        )


class SamShape(NamedTuple):
    """`n` square pictures with `side` patches a side."""

    side: int
    n: int = 1

    @property
    def side_out(self) -> int:
        """Rows of the result for a side of a picture."""
        return _SHRINKING.n_out(_SHRINKING.n_out(self.side))

    @property
    def n_out(self) -> int:
        """Rows of the result."""
        return self.n * self.side_out**2


class Sam:
    """SAM's encoder and the convolutions behind it, which shrink the grid of patches."""

    def __init__(self, keys: EncoderKeys, weights: Weights) -> None:
        """Take the weights v.sam.*. Raises GgufError or InvalidModel."""
        n, n_head = keys.int_("sam.embedding_length"), keys.int_("sam.head_count")
        if n % n_head:
            raise InvalidModel(f"{n_head} heads of a width of {n}")
        self._window = keys.int_("window_size")
        w = weights.shared
        weight, bias = w.require("v.sam.patch_embd.weight", PATCH, PATCH, 3, n), w.require("v.sam.patch_embd.bias", n)
        self._patches = PatchEmbedding(weight, bias, PATCH)
        side = weights.ne("v.sam.pos_embd.weight")[1]
        table = w.require("v.sam.pos_embd.weight", n, side, side)
        self._positions = PositionTable(table, side, side, Interpolation.BICUBIC)
        activation = Activation.read(keys)
        self._layers = [
            SamLayer.take(weights.layer(i, stack="v.sam.blk"), n, n_head, activation)
            for i in range(keys.int_("sam.block_count"))
        ]
        self._flatten = Convolution.take(weights, "v.sam.neck.0", 1, n)
        self._neck = Convolution.take(weights, "v.sam.neck.2", 3, self._flatten.n_out)
        first = Convolution.take(weights, "v.sam.net_2", 3, self._neck.n_out)
        second = Convolution.take(weights, "v.sam.net_3", 3, first.n_out)
        self._shrinking = first, second
        self._norms = [
            LayerNorm.take(w, f"v.sam.neck.{i}", of.n_out) for i, of in ((1, self._flatten), (3, self._neck))
        ]
        self.n_out = second.n_out

    def _areas(self, shape: SamShape) -> tuple[Area, Area]:
        """Return the windows, and the pictures as a whole."""
        n_windows = -(-shape.side // self._window)
        return Area("local", self._window, n_windows**2 * shape.n), Area("global", shape.side, shape.n)

    def arrays(self, shape: SamShape) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of the inputs, other than the patches."""
        side = shape.side
        found: dict[str, NDArray[Any]] = {
            **self._positions.arrays(side, side),
            "taps_neck": _KEEPING.taps(side, side, shape.n),
        }
        for i in range(2):
            found[f"taps_{i}"] = _SHRINKING.taps(side, side, shape.n)
            side = _SHRINKING.n_out(side)
        is_global = [i in _GLOBAL for i in range(len(self._layers))]
        local, whole = self._areas(shape)
        for area, used in ((local, not all(is_global)), (whole, any(is_global))):
            if used:
                found |= area.arrays()
                for layer in self._layers:
                    found |= layer.attention.arrays(area)
        if not all(is_global):
            found |= _windows(shape, self._window)
        return found

    def __call__(self, step: EncoderPass, shape: SamShape) -> Tensor:
        """Return F32 [n_out, shape.n_out], picture by picture, each row by row."""
        step = step.with_eps(EPS)
        side, n_patches = shape.side, shape.n * shape.side**2
        x = self._patches(step, n_patches)
        n = x.ne[0]
        positions = self._positions.of_grid(step, side, side)
        x = reshape(add(reshape(x, n, side * side, shape.n), positions), n, n_patches)
        for i, layer in enumerate(self._layers):
            x = self._layer(step, layer, x, shape, i)
        x = self._norms[0](step, self._flatten(step, x, "", n_patches, "neck_0"), "neck_1")
        x = self._norms[1](step, self._neck(step, x, "taps_neck", n_patches, "neck_2"), "neck_3")
        for i, convolution in enumerate(self._shrinking):
            side = _SHRINKING.n_out(side)
            x = convolution(step, x, f"taps_{i}", shape.n * side**2, f"net_{i}")
        return x

    def _layer(self, step: EncoderPass, layer: SamLayer, x: Tensor, shape: SamShape, i: int) -> Tensor:
        """Return the output of a layer."""
        local, whole = self._areas(shape)
        h = layer.attn_norm(step, x, f"sam_ln1-{i}")
        if i in _GLOBAL:
            h = layer.attention(step, h, whole, str(i))
        else:
            windows = step.input("to_windows", local.n * local.side**2, type=TensorType.I32)
            h = layer.attention(step, gather(h, windows), local, str(i))
            h = get_rows(h, step.input("from_windows", x.ne[1], type=TensorType.I32))
        x = add(h, x, f"sam_ffn_inp-{i}")
        return add(layer.feed_forward(step, layer.ffn_norm(step, x, f"sam_ln2-{i}"), f"sam-{i}"), x, f"sam_out-{i}")


def _windows(shape: SamShape, window: int) -> dict[str, NDArray[np.int32]]:
    """Return the patch at each place of the windows, and the place of each patch. The last windows of a row and column
    are padded.
    """
    side, n_windows = shape.side, -(-shape.side // window)
    n_patches = shape.n * side * side
    padded = np.full((shape.n, n_windows * window, n_windows * window), n_patches, np.int32)
    padded[:, :side, :side] = np.arange(n_patches, dtype=np.int32).reshape(shape.n, side, side)
    places = padded.reshape(shape.n, n_windows, window, n_windows, window).transpose(0, 1, 3, 2, 4).reshape(-1)
    back = np.empty(n_patches + 1, np.int32)
    back[places] = np.arange(len(places), dtype=np.int32)
    return {"to_windows": places.copy(), "from_windows": back[:-1].copy()}
