"""The encoders of Qwen-VL and those that are built like them (clip.cpp, models/qwen2vl.cpp, qwen3vl.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, concat, get_rows
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_file, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.frames import FramePairEmbedding
from llamado.models.encoders.grids import PatchGrid
from llamado.models.encoders.interpolation import Interpolation, PositionTable
from llamado.models.encoders.patches import ORDER
from llamado.models.encoders.projection import Projection
from llamado.models.encoders.rotation import POSITIONS, grid_positions, rotate_halves
from llamado.models.encoders.rows import merge_rows
from llamado.models.encoders.transformer import EncoderTransformer, NormKind
from llamado.models.encoders.windows import Windows, window_order
from llamado.models.errors import InvalidModel
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import Weights

THETA = 10_000.0
VISION_TEXTS = "<|vision_start|>", "<|vision_end|>"
TOKENS = "tokens"
"""Name of an input: the place of each token, row by row, in the order of windows."""
_WINDOW_PIXELS = 112


class Qwen2VlEncoder(DynamicEncoder):
    """Qwen2-VL: rotary positions, and squares of 2 × 2 patches that are merged and projected."""

    texts = VISION_TEXTS
    norm: ClassVar[NormKind] = NormKind.LAYER

    def _take_weights(self, weights: Weights) -> None:
        self.take_sizes()
        self._take_limits()
        self._transformer = EncoderTransformer(self.keys, weights, norm=self.norm)
        n = self._transformer.n_embd
        self._patches = FramePairEmbedding.take(weights, self.patch, n)
        self._projection = Projection.take(weights.shared, "mm.0", "mm.2", n * self.merge**2)
        self.n_embd = self._projection.n_out

    def _take_limits(self) -> None:
        """Read the options of preprocessing. Raises GgufError or InvalidModel."""
        self.options = limited_by_tokens(self.keys, image_options(self.keys, self.merge), 8, 4096)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        return {POSITIONS: grid_positions(order // grid.nx, order % grid.nx)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        x = self._transformer(step, self._patches(step, grid.n), rotate_halves(step, grid.n, THETA))
        step.graph.output(EMBEDDINGS, self._projection(step, merge_rows(x, self.merge**2), "projection"))
        return step.graph


class Qwen25VlEncoder(Qwen2VlEncoder):
    """Qwen2.5-VL: RMS norms, and attention in windows of 112 pixels, in all layers but each `n_wa_pattern`-th."""

    norm = NormKind.RMS

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        self._pattern = self._read_pattern()
        self._window = _WINDOW_PIXELS // self.patch // self.merge
        if self._pattern and not self._window:
            raise InvalidModel(f"patches of {self.patch} pixels are too large for windows of {_WINDOW_PIXELS}")

    def _read_pattern(self) -> int:
        return self.keys.int_("n_wa_pattern")

    def order(self, grid: PatchGrid) -> NDArray[np.int32]:
        order = super().order(grid)
        if not self._pattern:
            return order
        return order.reshape(-1, self.merge**2)[self._windows(grid)[0]].reshape(-1)

    def _windows(self, grid: PatchGrid) -> tuple[NDArray[np.int32], Windows]:
        """Return the order of the tokens by windows, and the windows, in patches."""
        order, windows = window_order(grid.nx // self.merge, grid.ny // self.merge, self._window)
        return order, Windows(tuple((count, n * self.merge**2) for count, n in windows.groups))

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        arrays = super().arrays(grid, order)
        return {**arrays, TOKENS: np.argsort(self._windows(grid)[0]).astype(np.int32)} if self._pattern else arrays

    def build(self, shape: tuple[int, ...]) -> Graph:
        if not self._pattern:
            return super().build(shape)
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        _, windows = self._windows(grid)
        x = self._transformer(
            step,
            self._patches(step, grid.n),
            rotate_halves(step, grid.n, THETA),
            lambda layer: windows if (layer + 1) % self._pattern else None,
        )
        x = self._projection(step, merge_rows(x, self.merge**2), "projection")
        step.graph.output(EMBEDDINGS, get_rows(x, step.input(TOKENS, self.n_tokens(grid), type=TensorType.I32)))
        return step.graph


class Exaone45Encoder(Qwen25VlEncoder):
    """EXAONE 4.5: as Qwen2.5-VL, with fewer heads of keys than of queries (models/exaone4_5.cpp)."""

    texts = "<vision>", "</vision>"

    def _read_pattern(self) -> int:
        return self.keys.int_("n_wa_pattern", 0)

    def _take_limits(self) -> None:
        self.options = limited_by_file(self.keys, image_options(self.keys, self.merge))


class Qwen3VlEncoder(Qwen2VlEncoder):
    """Qwen3-VL: learned positions, too, and embeddings of some layers beside those of the last (DeepStack)."""

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        keys, n = self.keys, self._transformer.n_embd
        if self._patches.bias is None:
            raise InvalidModel("tensor 'v.patch_embd.bias' is missing")
        side = isqrt(weights.ne("v.position_embd.weight")[1])
        table = weights.shared.require("v.position_embd.weight", n, side * side)
        self._positions = PositionTable(table, side, side, Interpolation.BILINEAR_CORNERS)
        self._deep: dict[int, tuple[LayerNorm, Projection]] = {}
        n_merged = n * self.merge**2
        for i in range(keys.int_("block_count")):
            name = f"v.deepstack.{i}"
            if weights.has(f"{name}.fc1.weight"):
                norm = LayerNorm.take(weights.shared, f"{name}.norm", n_merged)
                projection = Projection.take(weights.shared, f"{name}.fc1", f"{name}.fc2", n_merged)
                if projection.n_out != self._projection.n_out:
                    raise InvalidModel(
                        f"'{name}.fc2.weight' has {projection.n_out} rows; {self._projection.n_out} are expected"
                    )
                self._deep[i] = norm, projection
        self.n_embd *= 1 + len(self._deep)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        return {**super().arrays(grid, order), ORDER: order, **self._positions.arrays(*grid)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        deep: list[Tensor] = []

        def on_layer(layer: int, x: Tensor) -> None:
            if layer in self._deep:
                norm, projection = self._deep[layer]
                h = norm(step, merge_rows(x, self.merge**2), f"deepstack_norm-{layer}")
                deep.append(projection(step, h, f"deepstack-{layer}"))

        order = step.input(ORDER, grid.n, type=TensorType.I32)
        x = add(self._patches(step, grid.n), self._positions.rows(step, *grid, order), "pos_embed")
        x = self._transformer(step, x, rotate_halves(step, grid.n, THETA), on_layer=on_layer)
        x = self._project(step, x)
        for part in deep:
            x = concat(x, part, 0)
        step.graph.output(EMBEDDINGS, x)
        return step.graph

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return the embeddings of the last layer."""
        return self._projection(step, merge_rows(x, self.merge**2), "projection")
