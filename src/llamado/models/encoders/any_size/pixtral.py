"""Pixtral's encoder (arXiv 2410.07073) and those that are built like it (clip.cpp, models/pixtral.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, get_rows
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.media import Media
from llamado.media.preprocessing import ImageOptions, PreparedPicture, dyn_size, longest_edge
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid, place_inputs
from llamado.models.encoders.parts.patches import PatchEmbedding
from llamado.models.encoders.parts.projection import Projection
from llamado.models.encoders.parts.rotation import rotate_2d
from llamado.models.encoders.parts.rows import LAYOUT, merge_by_channel, with_rows
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind
from llamado.models.forward import Linear
from llamado.models.weights import Weights

_THETA = 10_000.0


class LightOnOcrEncoder(DynamicEncoder):
    """LightOnOCR: rotary positions in two dimensions, then squares of patches are merged and projected."""

    texts = "<|im_start|>", "<|im_end|>"
    has_rows = False

    def _take_weights(self, weights: Weights) -> None:
        keys, shared = self.keys, weights.shared
        is_merged = weights.has("mm.patch_merger.weight")
        self.take_sizes(keys.int_("spatial_merge_size", 1) if is_merged else 1)
        self.options = self._read_options()
        self._transformer = EncoderTransformer(keys, weights, norm=NormKind.RMS)
        n = self._transformer.n_embd
        self._patches = PatchEmbedding.take(weights, self.patch, n)
        self._norm: Tensor | None = None
        self._merger: Linear | None = None
        if is_merged:
            self._norm = shared.require("mm.input_norm.weight", n)
            n_out = weights.ne("mm.patch_merger.weight")[1]
            self._merger = Linear(shared.require("mm.patch_merger.weight", n * self.merge**2, n_out))
            n = n_out
        self._projection = Projection.take(shared, "mm.1", "mm.2", n)
        self.n_embd = self._projection.n_out

    def _read_options(self) -> ImageOptions:
        """Read the options of preprocessing. Raises GgufError or InvalidModel."""
        options = image_options(self.keys, self.merge)
        edge = self.keys.int_("preproc_image_size", options.image_size)
        return limited_by_tokens(self.keys, replace(options, longest_edge=edge), 0, 0)

    def preprocess(self, media: Media) -> PreparedPicture:
        return longest_edge(media, self.options)

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        x = self._patches(step, grid.n)
        x = self._transformer(step, x, rotate_2d(*place_inputs(step, grid.n), _THETA, interleaved=True))
        if self._merger is not None and self._norm is not None:
            x = step.norm(x, self._norm, "input_norm")
            x = self._merger(step, merge_by_channel(x, self.merge**2), "patch_merger")
        step.graph.output(EMBEDDINGS, self._arranged(step, self._projection(step, x, "projection"), grid))
        return step.graph

    def _arranged(self, step: EncoderPass, x: Tensor, grid: PatchGrid) -> Tensor:
        """Return the embeddings in the order of the prompt."""
        return x


class PixtralEncoder(LightOnOcrEncoder):
    """Pixtral and Mistral Small 3: a learned embedding ends each row of patches but the last."""

    texts = "", "[IMG_END]"

    def _read_options(self) -> ImageOptions:
        return limited_by_tokens(self.keys, image_options(self.keys, self.merge), 8, 1024)

    def preprocess(self, media: Media) -> PreparedPicture:
        return dyn_size(media, self.options)

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        self._row_end = weights.shared.require("v.token_embd.img_break", self.n_embd)

    def n_tokens(self, grid: PatchGrid) -> int:
        return super().n_tokens(grid) + grid.ny // self.merge - 1

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        nx, ny = grid.nx // self.merge, grid.ny // self.merge
        numbers = np.full((ny, nx + 1), nx * ny, np.int32)
        numbers[:, :nx] = np.arange(nx * ny, dtype=np.int32).reshape(ny, nx)
        return {**super().arrays(grid, order), LAYOUT: numbers.reshape(-1)[:-1].copy()}

    def _arranged(self, step: EncoderPass, x: Tensor, grid: PatchGrid) -> Tensor:
        layout = step.input(LAYOUT, self.n_tokens(grid), type=TensorType.I32)
        return get_rows(with_rows(x, self._row_end), layout)
