"""DeepSeek-OCR's encoders: SAM, then CLIP or Qwen2 (clip.cpp, models/deepseekocr.cpp and deepseekocr2.cpp)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import (
    Graph,
    add,
    concat,
    cont,
    get_rows,
    mul_mat,
    repeat,
    reshape,
    rope_ext,
    transpose,
    view_1d,
    view_3d,
)
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput, MediaChunk, Piece
from llamado.media.errors import MediaError
from llamado.media.media import Media
from llamado.media.patches import patches
from llamado.media.preprocessing import ImageOptions
from llamado.media.resize import Resize
from llamado.media.tiling import deepseekocr
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass, MediaEncoder
from llamado.models.encoders.parts.interpolation import Interpolation
from llamado.models.encoders.parts.patches import PATCHES
from llamado.models.encoders.parts.rows import LAYOUT, as_f32, with_rows
from llamado.models.encoders.parts.transformer import Activation, EncoderTransformer, NormKind
from llamado.models.encoders.tiled.sam import PATCH, SHRINK, Sam, SamShape
from llamado.models.errors import InvalidModel
from llamado.models.weights import Weights

_OVERVIEW, _FEWEST_TILES, _GRAY = 1024, 2, (127, 127, 127)
_CLIP_EPS = 1e-5
_THETA, _N_CTX = 1_000_000.0, 131_072


class DeepSeekOcrEncoder(MediaEncoder):
    """An encoder whose pictures are squares: the whole picture, or tiles side by side.

    The shape of an input: patches a side, number of tiles, and 1 for the whole picture. `has_rows`: the tiles of a row
    are one input.
    """

    tile_size: ClassVar[int]
    most_tiles: ClassVar[int]
    has_rows: ClassVar[bool]

    def _take_weights(self, weights: Weights) -> None:
        self.options = self._options()
        w = weights.shared
        self._sam = Sam(self.keys, weights)
        n_in, self.n_embd = weights.ne("mm.model.fc.weight")[:2]
        self._projection = w.linear("mm.model.fc", n_in, self.n_embd)
        self._row_end = w.optional("v.image_newline", self.n_embd)
        self._view_end = w.require("v.view_seperator", self.n_embd)

    def _options(self) -> ImageOptions:
        """Return the options of preprocessing."""
        keys = self.keys
        mean, std = keys.colors
        return ImageOptions(
            image_size=_OVERVIEW,
            patch_size=PATCH,
            mean=mean,
            std=std,
            resize=Resize(color=_GRAY),
            min_tiles=keys.int_("preproc_min_tiles", _FEWEST_TILES),
            max_tiles=keys.int_("preproc_max_tiles", self.most_tiles),
            tile_size=self.tile_size,
        )

    def prepare(self, media: Media) -> list[Piece]:
        found = deepseekocr(media, self.options)
        n = found.columns if self.has_rows else 1
        parts = [found.images[i : i + n] for i in range(0, len(found.images), n or 1)]
        assert found.overview is not None
        chunks = [self._chunk(media, part, i, is_overview=False) for i, part in enumerate(parts, 1)]
        return [*chunks, self._chunk(media, [found.overview], 0, is_overview=True), "\n"]

    def _chunk(self, media: Media, tiles: Sequence[NDArray[np.float32]], part: int, *, is_overview: bool) -> MediaChunk:
        given = self.input(tiles, is_overview=is_overview)
        n = self.n_tokens(SamShape(*given.shape[:2]), is_overview=is_overview)
        return MediaChunk(self.kind, given, n, self.digest(media, part))

    def input(self, tiles: Sequence[NDArray[np.float32]], *, is_overview: bool) -> EncoderInput:
        """Return the input for tiles, each float32 [side, side, 3], or for the whole picture. Raises MediaError."""
        side = len(tiles[0]) if tiles else 0
        if not side or side % (PATCH * SHRINK) or any(tile.shape != (side, side, 3) for tile in tiles):
            raise MediaError(f"tiles of {side} pixels a side are not made of squares of {PATCH * SHRINK}")
        shape = SamShape(side // PATCH, len(tiles))
        arrays = {PATCHES: np.concatenate([patches(tile, PATCH) for tile in tiles]), **self._sam.arrays(shape)}
        return EncoderInput((*shape, int(is_overview)), arrays | dict(self.arrays(shape, is_overview=is_overview)))

    @abstractmethod
    def arrays(self, shape: SamShape, *, is_overview: bool) -> Mapping[str, NDArray[Any]]:
        """Return the arrays of the other inputs."""

    @abstractmethod
    def n_tokens(self, shape: SamShape, *, is_overview: bool) -> int:
        """Return the number of embeddings."""


class DeepSeekOcr1Encoder(DeepSeekOcrEncoder):
    """DeepSeek-OCR: SAM's output and what CLIP makes of it, side by side; a learned row ends each row of a picture.

    The positions of CLIP for tiles are those that llama.cpp computes, which differ from the model's.
    """

    tile_size, most_tiles, has_rows = 640, 9, True

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        self._transformer = EncoderTransformer(self.keys, weights, activation=Activation.GELU_QUICK)
        n = self._transformer.n_embd
        if n != self._sam.n_out:
            raise InvalidModel(f"the widths of CLIP and SAM, {n} and {self._sam.n_out}, differ")
        if self._row_end is None:
            raise weights.missing("v.image_newline", (self.n_embd,))
        self._end = self._row_end
        self._class = weights.shared.require("v.class_embd", n)
        n_positions = weights.ne("v.position_embd.weight")[1]
        self._positions = weights.shared.require("v.position_embd.weight", n, n_positions)
        self._side = isqrt(n_positions - 1)

    def n_tokens(self, shape: SamShape, *, is_overview: bool) -> int:
        side = shape.side_out
        return (side * shape.n + 1) * side + is_overview

    def arrays(self, shape: SamShape, *, is_overview: bool) -> Mapping[str, NDArray[Any]]:
        side, n = shape.side_out, shape.n
        numbers = np.full((side, n * side + 1), shape.n_out, np.int32)
        tiles = np.arange(shape.n_out, dtype=np.int32).reshape(n, side, side)
        numbers[:, :-1] = tiles.transpose(1, 0, 2).reshape(side, n * side)
        ends = [shape.n_out + 1] if is_overview else []
        found: dict[str, NDArray[Any]] = {LAYOUT: np.array([*numbers.reshape(-1), *ends], np.int32)}
        if side != self._side:
            found["clip_x"] = Interpolation.BICUBIC.weights(self._positions.ne[0], side)
            found["clip_y"] = Interpolation.BICUBIC.weights(self._side**2, side)
        return found

    def build(self, shape: tuple[int, ...]) -> Graph:
        side, n, is_overview = shape
        pictures = SamShape(side, n)
        step = EncoderPass(_CLIP_EPS)
        sam = self._sam(step, pictures)
        width, per_picture = sam.ne[0], pictures.side_out**2
        x = concat(repeat(self._class_row(width), width, 1, n), reshape(sam, width, per_picture, n), 1)
        x = add(x, self._positions_of(step, pictures.side_out))
        x = self._transformer(step, reshape(x, width, (per_picture + 1) * n), n_sequences=n)
        rows = view_3d(x, width, per_picture, n, x.nb[1], (per_picture + 1) * x.nb[1], x.nb[1])
        x = concat(reshape(cont(rows), width, per_picture * n), sam, 0)
        x = with_rows(self._projection(step, x, "projection"), self._end, self._view_end)
        layout = step.input(LAYOUT, self.n_tokens(pictures, is_overview=bool(is_overview)), type=TensorType.I32)
        step.graph.output(EMBEDDINGS, get_rows(x, layout))
        return step.graph

    def _class_row(self, n: int) -> Tensor:
        return as_f32(reshape(self._class, n, 1))

    def _positions_of(self, step: EncoderPass, side: int) -> Tensor:
        """Return the positions of a picture: F32 [n_embd, side² + 1].

        If the table is of another side, llama.cpp interpolates between the table's channels and rows instead of
        between the rows and columns of the picture, and appends a row that begins `side`² bytes into the table.
        """
        table = as_f32(self._positions)
        n, n_old = table.ne[0], self._side**2
        if side == self._side:
            return table
        rows = view_3d(table, n, n_old, 1, table.nb[1], table.nb[2])
        columns = mul_mat(step.input("clip_x", n, side), rows)  # [side, n_old]
        square = mul_mat(cont(transpose(columns)), step.input("clip_y", n_old, side))  # [side, side]
        again = repeat(reshape(square, side * side, 1), side * side, n)
        last = view_1d(table, n, n_old)
        return concat(reshape(again, n, side * side), reshape(last, n, 1), 1)


class DeepSeekOcr2Encoder(DeepSeekOcrEncoder):
    """DeepSeek-OCR 2: learned queries behind SAM's output read it through Qwen2's layers."""

    tile_size, most_tiles, has_rows = 768, 6, False

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        self.keys.int_("attention.head_count_kv")
        self._transformer = EncoderTransformer(self.keys, weights, norm=NormKind.RMS, activation=Activation.SILU)
        n = self._transformer.n_embd
        if n != self._sam.n_out:
            raise InvalidModel(f"the widths of Qwen2 and SAM, {n} and {self._sam.n_out}, differ")
        sizes = ((pixels, (pixels // PATCH // SHRINK) ** 2) for pixels in (768, 1024))
        self._queries = {
            n_queries: found
            for pixels, n_queries in sizes
            if (found := weights.shared.optional(f"v.resample_query_{pixels}.weight", n, n_queries)) is not None
        }

    def n_tokens(self, shape: SamShape, *, is_overview: bool) -> int:
        return shape.n_out + is_overview

    def arrays(self, shape: SamShape, *, is_overview: bool) -> Mapping[str, NDArray[Any]]:
        n = shape.n_out
        if n not in self._queries:
            raise MediaError(f"the model has no queries for pictures of {shape.side * PATCH} pixels a side")
        mask = np.zeros((2 * n, 2 * n), np.float16)
        mask[:, n:] = np.where(np.tri(2 * n, n, -n, dtype=bool), 0, -np.inf)
        return {"mask": mask, "positions": np.arange(2 * n, dtype=np.int32)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        side, _, is_overview = shape
        step = EncoderPass(self._transformer.norm_eps)
        sam = self._sam(step, SamShape(side))
        n_embd, n = sam.ne[:2]
        positions = step.input("positions", 2 * n, type=TensorType.I32)
        mask = step.input("mask", 2 * n, 2 * n, type=TensorType.F16)

        def rotate(x: Tensor) -> Tensor:
            numbers = _THETA, 1.0, 0.0, 1.0, 0.0, 0.0
            return rope_ext(x, positions, None, x.ne[0], RopeMode.NEOX, _N_CTX, *numbers)

        x = self._transformer(step, with_rows(sam, self._queries[n]), rotate, lambda layer: mask)
        answers = cont(view_3d(x, n_embd, n, 1, x.nb[1], n * x.nb[1], n * x.nb[1]))
        x = self._projection(step, reshape(answers, n_embd, n), "projection")
        step.graph.output(EMBEDDINGS, with_rows(x, self._view_end) if is_overview else x)
        return step.graph
