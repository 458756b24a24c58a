"""Granite Vision 4: SigLIP over all tiles of a picture, and query transformers over the output of several layers."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, concat, get_rows, repeat, reshape, unary, view_2d
from llamado.ggml.ops import UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.media import Media, MediaKind
from llamado.media.patches import patches
from llamado.media.tiling import granite
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.parts.patches import ORDER, PATCHES, add_positions
from llamado.models.encoders.parts.rows import mean_of_groups
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind, attend, split_sequences, take_norm
from llamado.models.encoders.pictures import PictureEncoder, Pixels
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm, RmsNorm
from llamado.models.weights import RoleWeights, Weights

HEAD_DIM = 64
NORM_EPS = 1e-12
"""Epsilon of the norms of the query transformers."""
WINDOW_ORDER, TOKENS = "window_order", "tokens"
"""Names of inputs: the order of the patches in a window; the row of each token, the last row being a line's end."""


class QueryAttention(NamedTuple):
    """Attention of the queries of a window, added to them and normed."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear
    norm: LayerNorm | RmsNorm

    @classmethod
    def take(cls, w: RoleWeights, name: str, n: int) -> QueryAttention:
        """Take the attention `name`. Raises InvalidModel."""
        q, k, v, out = (w.linear(f"{name}_{part}", n, n) for part in ("q", "k", "v", "out"))
        return cls(q, k, v, out, take_norm(w, f"{name}_norm", n, NormKind.LAYER))

    def __call__(self, step: EncoderPass, queries: Tensor, rows: Tensor, n_windows: int, name: str) -> Tensor:
        """Return F32 [n_embd, n_queries] for the queries and the rows that they see, one window behind the other."""
        heads = queries.ne[0] // HEAD_DIM
        q, k, v = (
            split_sequences(reshape(part(step, x, f"{name}_{which}"), HEAD_DIM, heads, x.ne[1]), n_windows)
            for part, x, which in ((self.q, queries, "q"), (self.k, rows, "k"), (self.v, rows, "v"))
        )
        x = add(self.out(step, attend(q, k, v, 1 / math.sqrt(HEAD_DIM)), f"{name}_out"), queries)
        return self.norm(step, x, f"{name}_norm")


class QueryTransformer(NamedTuple):
    """Queries for each window of a layer's output, one layer of attention to each other and to the window, a network,
    and a matrix.

    `offset` is the number of the patch in each square of 2 × 2 that is added to a query, or below 0: the mean of the
    patches.
    """

    offset: int
    norm: LayerNorm | RmsNorm
    query: Tensor
    positions: Tensor
    query_norm: LayerNorm | RmsNorm
    self_attention: QueryAttention
    cross_attention: QueryAttention
    up: Linear
    down: Linear
    ffn_norm: LayerNorm | RmsNorm
    projection: Linear

    @classmethod
    def take(cls, weights: Weights, number: int, offset: int, sides: tuple[int, int], n: int) -> QueryTransformer:
        """Take a transformer; `sides` are those of windows in patches and in queries. Raises InvalidModel."""
        w, (window, queries) = weights.layer(number, stack="v.proj_blk"), sides
        n_ff, n_out = w.ne("ffn_up.weight")[1], w.ne("linear.weight")[1]
        return cls(
            offset=offset,
            norm=take_norm(w, "norm", n, NormKind.LAYER),
            query=w.require("query", n, queries**2),
            positions=w.require("img_pos", n, window**2),
            query_norm=take_norm(w, "post_norm", n, NormKind.LAYER),
            self_attention=QueryAttention.take(w, "self_attn", n),
            cross_attention=QueryAttention.take(w, "cross_attn", n),
            up=w.linear("ffn_up", n, n_ff),
            down=w.linear("ffn_down", n_ff, n),
            ffn_norm=take_norm(w, "ffn_norm", n, NormKind.LAYER),
            projection=w.linear("linear", n, n_out),
        )

    def __call__(self, step: EncoderPass, x: Tensor, name: str) -> Tensor:
        """Return F32 [projection_dim, n_queries] for the patches, window by window."""
        n, (window_size, n_queries) = x.ne[0], (self.positions.ne[1], self.query.ne[1])
        n_windows, n_each = x.ne[1] // window_size, window_size // n_queries
        x = self.norm(step, x, f"{name}_norm")
        if self.offset < 0:
            downsampled = mean_of_groups(x, n_each)
        else:
            downsampled = view_2d(x, n, x.ne[1] // n_each, n_each * x.nb[1], self.offset * x.nb[1])
        order = step.input(WINDOW_ORDER, window_size, type=TensorType.I32)
        positions = reshape(get_rows(self.positions, order), n * window_size, 1)
        rows = reshape(add(reshape(x, n * window_size, n_windows), positions), n, x.ne[1])
        queries = view_2d(downsampled, n, n_queries * n_windows, downsampled.nb[1])
        queries = add(repeat(self.query, n, n_queries * n_windows), queries, f"{name}_queries")
        step = step.with_eps(NORM_EPS)
        h = self.query_norm(step, queries, f"{name}_post_norm")
        h = self.self_attention(step, h, h, n_windows, f"{name}_self")
        h = self.cross_attention(step, h, rows, n_windows, f"{name}_cross")
        up = unary(self.up(step, h, f"{name}_up"), UnaryOp.GELU_ERF)
        h = self.ffn_norm(step, add(self.down(step, up, f"{name}_down"), h), f"{name}_ffn_norm")
        return self.projection(step, h, f"{name}_out")


class Granite4VisionEncoder(PictureEncoder):
    """A picture's overview and tiles become one chunk: the tokens of the overview, then the lines of the tiles' grid,
    each with a token for its end.

    An embedding is those of all query transformers side by side.
    """

    def _take_transformer(self, weights: Weights) -> EncoderTransformer:
        n_layer = self.keys.int_("block_count")
        self._layers = self.keys.ints("feature_layer")
        if not self._layers or not all(0 <= layer < n_layer for layer in self._layers):
            raise InvalidModel(f"'{self.keys.name('feature_layer')}': {list(self._layers)}, of {n_layer} layers")
        return EncoderTransformer(self.keys, weights, n_layer=max(self._layers) + 1)

    def _take_projector(self, weights: Weights) -> None:
        keys, n = self.keys, self.transformer.n_embd
        self.side = self.require_squares()
        self.require_positions(self.side**2)
        self.window, self.queries = keys.int_("projector.window_side"), keys.int_("projector.query_side")
        if self.side % self.window or self.window % self.queries:
            raise InvalidModel(f"windows of {self.window} patches, with {self.queries} queries, in {self.side} a side")
        if n % HEAD_DIM:
            raise InvalidModel(f"'{keys.name('embedding_length')}' is {n}; a multiple of {HEAD_DIM} is expected")
        offsets = keys.ints("projector.spatial_offsets")
        if len(offsets) != len(self._layers):
            raise InvalidModel(f"{len(offsets)} spatial offsets for {len(self._layers)} layers")
        if max(offsets) >= 0 and self.window != 2 * self.queries:
            raise UnsupportedModel(f"spatial offsets with {self.queries} queries for {self.window} patches")
        sides = self.window, self.queries
        self._blocks = [QueryTransformer.take(weights, i, offset, sides, n) for i, offset in enumerate(offsets)]
        widths = {block.projection.weight.ne[1] for block in self._blocks}
        if widths != {keys.projection_dim}:
            raise InvalidModel(
                f"'{keys.name('projection_dim')}' is {keys.projection_dim}; tensors have {sorted(widths)}"
            )
        if not self._resolutions():
            raise InvalidModel(f"'{keys.name('image_grid_pinpoints')}' is missing or empty")
        self._newline = weights.shared.require("v.image_newline", keys.projection_dim)
        self.n_embd = len(self._blocks) * keys.projection_dim

    @property
    def out_side(self) -> int:
        """Tokens of a side of a tile."""
        return self.side // self.window * self.queries

    def _order(self) -> NDArray[np.int32]:
        """Return the patches of a tile: windows row by row, and in each the squares of patches that share a query."""
        return _windows(self.side, self.window)[:, self._window_order()].reshape(-1)

    def _window_order(self) -> NDArray[np.int32]:
        return _windows(self.window, self.window // self.queries).reshape(-1)

    def tiles(
        self, overview: Pixels, tiles: list[Pixels], grid: tuple[int, int], size: tuple[int, int]
    ) -> EncoderInput:
        """Return the input for the overview and the tiles, row by row.

        `grid`: columns and rows of the tiles. `size`: width and height of the picture.
        """
        order = self._order()
        each = np.concatenate([patches(tile, self.patch)[order] for tile in (overview, *tiles)])
        tokens = self._tokens(grid, size)
        arrays = {
            PATCHES: each,
            ORDER: np.tile(order, len(each) // order.size),
            WINDOW_ORDER: self._window_order(),
            TOKENS: tokens,
        }
        return EncoderInput((len(tiles) + 1, tokens.size), arrays)

    def _tokens(self, grid: tuple[int, int], size: tuple[int, int]) -> NDArray[np.int32]:
        """Return the row of each token: int32 [n_tokens]."""
        side, (columns, rows) = self.out_side, grid
        # Window by window to row by row.
        in_tile = np.argsort(_windows(side, self.queries).reshape(-1)).astype(np.int32)
        if not columns or not rows:
            return in_tile
        starts = side**2 * (1 + np.arange(rows * columns, dtype=np.int32))
        tiles = (starts[:, None] + in_tile).reshape(rows, columns, side, side)
        lines = tiles.transpose(0, 2, 1, 3).reshape(rows * side, columns * side)
        left, top, width, height = unpad(columns * side, rows * side, *size)
        lines = lines[top : top + height, left : left + width]
        end = np.full((height, 1), side**2 * (1 + rows * columns), np.int32)
        return np.concatenate([in_tile, np.concatenate([lines, end], axis=1).reshape(-1)])

    def prepare(self, media: Media) -> list[Piece]:
        prepared = granite(media, self.options)
        height, width, _ = media.data.shape
        assert prepared.overview is not None
        grid = prepared.columns, prepared.rows
        given = self.tiles(prepared.overview, list(prepared.images), grid, (width, height))
        return [MediaChunk(MediaKind.IMAGE, given, given.shape[1], self.digest(media), causal=self.causal), "\n"]

    def build(self, shape: tuple[int, ...]) -> Graph:
        n_tiles, n_tokens = shape
        step = EncoderPass(self.transformer.norm_eps)
        outputs: dict[int, Tensor] = {}
        x = add_positions(step, self.patches(step, n_tiles * self.side**2), self.table)
        self.transformer(step, x, on_layer=outputs.__setitem__, n_sequences=n_tiles)
        found: Tensor | None = None
        for number, (block, layer) in enumerate(zip(self._blocks, self._layers, strict=True)):
            part = block(step, outputs[layer], f"block_{number}")
            found = part if found is None else concat(found, part, 0)
        assert found is not None
        newline = reshape(repeat(self._newline, self._newline.ne[0], len(self._blocks)), self.n_embd, 1)
        tokens = step.input(TOKENS, n_tokens, type=TensorType.I32)
        step.graph.output(EMBEDDINGS, get_rows(concat(found, newline, 1), tokens))
        return step.graph


def unpad(width: int, height: int, picture_width: int, picture_height: int) -> tuple[int, int, int, int]:
    """Return left, top, width and height of the part of a grid of tokens that the picture fills (clip_anyres_unpad)."""
    wider = np.float32(picture_width) / np.float32(picture_height) > np.float32(width) / np.float32(height)
    if wider:
        top = (height - math.floor(picture_height * width / picture_width + 1e-7)) // 2
        return 0, top, width, height - 2 * top
    left = (width - math.floor(picture_width * height / picture_height + 1e-7)) // 2
    return left, 0, width - 2 * left, height


def _windows(side: int, window: int) -> NDArray[np.int32]:
    """Return the numbers of the cells of a grid, row by row, in each window: int32 [n_windows, window²]."""
    n = side // window
    cells = np.arange(side * side, dtype=np.int32).reshape(n, window, n, window)
    return cells.transpose(0, 2, 1, 3).reshape(n * n, window * window)
