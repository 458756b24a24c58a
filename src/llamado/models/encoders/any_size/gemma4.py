"""Vision encoders of Gemma 4 (clip.cpp, models/gemma4v.cpp and gemma4uv.cpp)."""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, get_rows, mul, rms_norm, scale, sub, view_2d
from llamado.ggml.ops import RopeMode
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import EncoderInput
from llamado.media.errors import MediaError
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid, place_inputs
from llamado.models.encoders.parts.clamped import ClampedPass, read_limits
from llamado.models.encoders.parts.patches import PATCHES, PatchEmbedding
from llamado.models.encoders.parts.rotation import rotate_2d
from llamado.models.encoders.parts.rows import mean_of_groups
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import Weights

_THETA = 100.0
_TEXTS = "<|image>", "<image|>"
_LIMITS, _MERGE = (70, 1120), 3
_SMALL = 1536, 2560
"""Widths of E2B and E4B, whose text models use a causal mask for pictures, too."""
_LAYER_NORM_EPS = 1e-5


class AxisTables(NamedTuple):
    """Learned positions as the sum of a row for the column of a patch and one for its row."""

    table: Tensor

    @classmethod
    def take(cls, weights: Weights, n: int) -> AxisTables:
        """Take the tables of both axes. Raises InvalidModel."""
        name = "v.position_embd.weight"
        return cls(weights.shared.require(name, n, weights.ne(name)[1], 2))

    @property
    def n(self) -> int:
        """Most columns and rows."""
        return self.table.ne[1]

    def check(self, given: EncoderInput) -> EncoderInput:
        """Return an input. Raises MediaError if its grid is larger than the tables."""
        if max(given.shape) > self.n:
            raise MediaError(f"a picture of {given.shape[0]} x {given.shape[1]} patches; a side has at most {self.n}")
        return given

    def add_to(self, x: Tensor, columns: Tensor, rows: Tensor) -> Tensor:
        """Add the positions of patches."""
        n, size, row = x.ne[0], self.n, self.table.nb[1]
        for i, at in enumerate((columns, rows)):
            x = add(x, get_rows(view_2d(self.table, n, size, row, i * self.table.nb[2]), at), f"pos_embed-{i}")
        return x


class Gemma4Encoder(DynamicEncoder):
    """Gemma 4: learned and rotary positions, the means of squares of patches, a projection."""

    texts = _TEXTS
    has_rows = False

    @property
    def causal(self) -> bool:
        return self.n_embd in _SMALL

    def _take_weights(self, weights: Weights) -> None:
        keys, shared = self.keys, weights.shared
        self.take_sizes(keys.int_("projector.scale_factor", _MERGE))
        self.options = limited_by_tokens(keys, image_options(keys, self.merge), *_LIMITS)
        self._transformer = EncoderTransformer(keys, weights, norm=NormKind.RMS, scale=1.0, has_unit_values=True)
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        self._positions = AxisTables.take(weights, n)
        bias, factor = (shared.optional(f"v.std_{which}", n) for which in ("bias", "scale"))
        self._standard = None if bias is None or factor is None else (bias, factor)
        self.n_embd = weights.ne("mm.input_projection.weight")[1]
        self._projection = Linear(shared.require("mm.input_projection.weight", n, self.n_embd))
        self._limits = read_limits(weights)

    def scaled(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        return pixels * np.float32(2) - np.float32(1)

    def input(self, pixels: NDArray[np.float32]) -> EncoderInput:
        return self._positions.check(super().input(pixels))

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = ClampedPass(self._transformer.norm_eps, self._limits)
        rows, columns = place_inputs(step, grid.n)
        x = self._positions.add_to(self._patches(step, grid.n), columns, rows)
        x = self._transformer(step, x, rotate_2d(columns, rows, _THETA, mode=RopeMode.NEOX))
        x = scale(mean_of_groups(x, self.merge**2), sqrt(x.ne[0]), name="pooled")
        if self._standard is not None:
            bias, factor = self._standard
            x = mul(sub(x, bias), factor, "std_scaled")
        step.graph.output(EMBEDDINGS, self._projection(step, rms_norm(x, step.norm_eps), "projected"))
        return step.graph


class Gemma4UnifiedEncoder(DynamicEncoder):
    """Gemma 4 without an encoder: large patches are normed, projected and given positions."""

    texts = _TEXTS
    has_rows = False

    @property
    def causal(self) -> bool:
        return False

    def _take_weights(self, weights: Weights) -> None:
        keys, shared = self.keys, weights.shared
        merge = keys.int_("projector.scale_factor", _MERGE)
        self.options = limited_by_tokens(keys, image_options(keys, merge), *_LIMITS)
        self.patch, self.merge = self.options.align, 1
        self._eps = keys.float_("attention.layer_norm_epsilon")
        n, n_pixels = keys.int_("embedding_length"), 3 * self.patch**2
        self._norms = [
            LayerNorm.take(shared, f"v.patch_norm.{i}", width) for i, width in ((1, n_pixels), (2, n), (3, n))
        ]
        self._patches = Linear(
            shared.require("v.patch_embd.weight", n_pixels, n), shared.require("v.patch_embd.bias", n)
        )
        self._positions = AxisTables.take(weights, n)
        self.n_embd = weights.ne("mm.input_projection.weight")[1]
        self._projection = Linear(shared.require("mm.input_projection.weight", n, self.n_embd))

    def input(self, pixels: NDArray[np.float32]) -> EncoderInput:
        return self._positions.check(super().input(pixels))

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(_LAYER_NORM_EPS)
        rows, columns = place_inputs(step, grid.n)
        before, between, behind = self._norms
        x = before(step, step.input(PATCHES, 3 * self.patch**2, grid.n), "patch_norm_1")
        x = between(step, self._patches(step, x, "patch_embd"), "patch_norm_2")
        x = behind(step, self._positions.add_to(x, columns, rows), "patch_norm_3")
        step.graph.output(EMBEDDINGS, self._projection(step, rms_norm(x, self._eps), "projected"))
        return step.graph
