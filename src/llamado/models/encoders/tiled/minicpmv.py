"""MiniCPM-V (arXiv 2408.01800): SigLIP for pictures of any size, and a resampler with a fixed number of queries."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import add, concat, cos, mul, repeat, reshape, sin
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import EncoderInput, TokenText
from llamado.media.media import Media
from llamado.media.preprocessing import PreparedPicture
from llamado.media.tiling import llava_uhd
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.patches import ORDER
from llamado.models.encoders.parts.transformer import NormKind, attend, take_norm
from llamado.models.encoders.pictures import Pixels, VitEncoder
from llamado.models.encoders.texts import PictureTexts
from llamado.models.errors import InvalidModel, UnsupportedModel
from llamado.models.weights import Weights

TABLE_SIDE = 70
"""Rows and columns of the table of positions; patches of other numbers share it."""
HEAD_DIM = 128
FREQ_BASE = 10000.0
VERSIONS = (2, 3, 4, 5, 6, 100045)
OLD_QUERIES, QUERIES = 96, 64
"""Numbers of queries in version 2 and later, for files that do not have the number."""
COLUMNS, ROWS, FREQUENCIES = "columns", "rows", "frequencies"
"""Names of inputs: the column and row of each patch, and the frequencies of their sines."""

SLICES = PictureTexts(
    overview_begin=(TokenText("<image>"),),
    overview_end=(TokenText("</image>"),),
    tile_begin=(TokenText("<slice>"),),
    tile_end=(TokenText("</slice>"),),
    row_end=(TokenText("\n"),),
    is_overview_first=True,
)
OLD_SLICES = SLICES._replace(
    tiles_begin=SLICES.tile_begin,
    tiles_end=SLICES.tile_end,
    tile_begin=SLICES.overview_begin,
    tile_end=SLICES.overview_end,
)


class MiniCpmVEncoder(VitEncoder):
    """MiniCPM-V 2.5 to 4.5, MiniCPM-o: each part of a picture becomes the same number of tokens."""

    def _take_projector(self, weights: Weights) -> None:
        keys, w = self.keys, weights.shared
        version = keys.int_("minicpmv_version", 0) or 2
        if version not in VERSIONS:
            known = ", ".join(map(str, VERSIONS))
            raise UnsupportedModel(f"'{keys.name('minicpmv_version')}' is {version}; {known} are supported")
        self.texts, n_queries = (OLD_SLICES, OLD_QUERIES) if version == 2 else (SLICES, QUERIES)
        self._n_queries = keys.int_("minicpmv_query_num", 0) or n_queries
        self.require_squares()
        self.require_positions(TABLE_SIDE**2)
        n = self.n_embd = weights.ne("resampler.proj.weight")[0]
        if n % HEAD_DIM:
            raise InvalidModel(f"the width of 'resampler.proj.weight', {n}, is not a multiple of {HEAD_DIM}")
        w.ignore("resampler.pos_embed_k")
        self._query = w.require("resampler.query", n, self._n_queries)
        self._kv = w.require("resampler.kv.weight", self.transformer.n_embd, n)
        self._query_norm, self._kv_norm, self._post_norm = (
            take_norm(w, f"resampler.ln_{name}", n, NormKind.LAYER) for name in ("q", "kv", "post")
        )
        self._q, self._k, self._v, self._out = (
            w.linear(f"resampler.attn.{name}", n, n) for name in ("q", "k", "v", "out")
        )
        self._projection = w.require("resampler.proj.weight", n, n)

    def n_tokens(self, n_patches: int) -> int:
        return self._n_queries

    def preprocess(self, media: Media) -> PreparedPicture:
        return llava_uhd(media, self.options)

    def input(self, pixels: Pixels) -> EncoderInput:
        given = super().input(pixels)
        height, width, _ = pixels.shape
        nx, ny = width // self.patch, height // self.patch
        rows, columns = np.divmod(given.arrays[ORDER], np.int32(nx))
        n = self.n_embd // 4
        powers = np.float32(FREQ_BASE) ** (np.arange(n, dtype=np.float32) / np.float32(n))
        more = {
            ORDER: buckets(rows, ny) * np.int32(TABLE_SIDE) + buckets(columns, nx),
            ROWS: rows.astype(np.float32),
            COLUMNS: columns.astype(np.float32),
            FREQUENCIES: (np.float32(1) / powers).astype(np.float32),
        }
        return EncoderInput(given.shape, {**given.arrays, **more})

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        n_patches, n_head = x.ne[1], self.n_embd // HEAD_DIM
        values = self._kv_norm(step, step.mul_mat(self._kv, x, "resampler_kv"), "ln_kv")
        keys = add(values, self._sines(step, n_patches), "resampler_positions")
        queries = self._query_norm(step, self._query, "ln_q")
        q, k, v = (
            reshape(linear(step, rows, f"resampler_{name}"), HEAD_DIM, n_head, rows.ne[1])
            for linear, rows, name in ((self._q, queries, "q"), (self._k, keys, "k"), (self._v, values, "v"))
        )
        x = self._out(step, attend(q, k, v, 1 / math.sqrt(HEAD_DIM)), "resampler_attn_out")
        return step.mul_mat(self._projection, self._post_norm(step, x, "ln_post"), "projection")

    def _sines(self, step: EncoderPass, n_patches: int) -> Tensor:
        """Return the positions of the patches: sines and cosines of the column, then of the row: F32 [n_embd, n]."""
        n = self.n_embd // 4
        frequencies = repeat(step.input(FREQUENCIES, n), n, n_patches)
        angles = [mul(frequencies, step.input(name, 1, n_patches)) for name in (COLUMNS, ROWS)]
        halves = [concat(sin(each), cos(each), 0) for each in angles]
        return concat(halves[0], halves[1], 0)


def buckets(at: NDArray[np.int32], n: int) -> NDArray[np.int32]:
    """Return the row or column of the table for the rows or columns `at` of `n`."""
    return np.floor(float(TABLE_SIDE) * at / n).astype(np.int32)
