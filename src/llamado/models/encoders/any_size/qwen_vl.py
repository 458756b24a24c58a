"""The encoders of Qwen-VL and those that are built like them (clip.cpp, models/qwen2vl.cpp, qwen3vl.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, add, concat, get_rows
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.media import Media
from llamado.media.model_sizes import youtuvl
from llamado.media.preprocessing import PreparedPicture
from llamado.media.resize import PadStyle, Resize, ResizeFilter
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_file, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid
from llamado.models.encoders.parts.frames import FramePairEmbedding
from llamado.models.encoders.parts.interpolation import Interpolation, PositionTable
from llamado.models.encoders.parts.patches import ORDER, PATCHES
from llamado.models.encoders.parts.projection import Projection
from llamado.models.encoders.parts.rotation import POSITIONS, grid_positions, rotate_halves
from llamado.models.encoders.parts.rows import merge_rows
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind, Rotate
from llamado.models.encoders.parts.windows import Windows, window_order
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm, RmsNorm
from llamado.models.weights import Weights

THETA = 10_000.0
VISION_TEXTS = "<|vision_start|>", "<|vision_end|>"
TOKENS = "tokens"
"""Name of an input: the place of each token, row by row, in the order of windows."""
_WINDOW_PIXELS = 112


class FlatPatchEmbedding(NamedTuple):
    """A matrix for patches whose rows have the colors of each pixel side by side."""

    matrix: Linear

    def __call__(self, step: EncoderPass, n_patches: int) -> Tensor:
        """Return F32 [n_embd, n_patches]."""
        return self.matrix(step, step.input(PATCHES, self.matrix.weight.ne[0], n_patches), "patch_embd")


class Qwen2VlEncoder(DynamicEncoder):
    """Qwen2-VL: rotary positions, and squares of 2 × 2 patches that are merged and projected."""

    texts = VISION_TEXTS
    norm: ClassVar[NormKind] = NormKind.LAYER

    def _take_weights(self, weights: Weights) -> None:
        self.take_sizes()
        self._take_limits()
        self._transformer = EncoderTransformer(self.keys, weights, norm=self.norm)
        n = self._transformer.n_embd
        self._patches = self._take_patches(weights, n)
        self._projection = Projection.take(weights.shared, "mm.0", "mm.2", n * self.merge**2)
        self.n_embd = self._projection.n_out

    def _take_patches(self, weights: Weights, n_embd: int) -> FramePairEmbedding | FlatPatchEmbedding:
        """Take the patch embedding. Raises InvalidModel."""
        return FramePairEmbedding.take(weights, self.patch, n_embd)

    def _take_limits(self) -> None:
        """Read the options of preprocessing. Raises GgufError or InvalidModel."""
        self.options = limited_by_tokens(self.keys, image_options(self.keys, self.merge), 8, 4096)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        return {POSITIONS: grid_positions(order // grid.nx, order % grid.nx)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        x = self._transformer(step, self._patches(step, grid.n), rotate_halves(step, grid.n, THETA))
        step.graph.output(EMBEDDINGS, self._project(step, x))
        return step.graph

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return the embeddings for the output of the last layer."""
        return self._projection(step, merge_rows(x, self.merge**2), "projection")


class Qwen25VlEncoder(Qwen2VlEncoder):
    """Qwen2.5-VL: RMS norms, and attention in windows of 112 pixels, in all layers but each `n_wa_pattern`-th."""

    norm = NormKind.RMS

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        n_layer = len(self._transformer.layers)
        self._full = self._read_full_layers(n_layer)
        self._has_windows = len(self._full) < n_layer
        pixels = self._read_window()
        self._window = pixels // self.patch // self.merge
        if self._has_windows and not self._window:
            raise InvalidModel(f"patches of {self.patch} pixels are too large for windows of {pixels}")

    def _read_full_layers(self, n_layer: int) -> frozenset[int]:
        """Return the layers whose attention has no windows. Raises GgufError or InvalidModel."""
        return self._each(self.keys.int_("n_wa_pattern"), n_layer)

    @staticmethod
    def _each(pattern: int, n_layer: int) -> frozenset[int]:
        """Return each `pattern`-th layer; all, if it is 0."""
        return frozenset(i for i in range(n_layer) if not pattern or not (i + 1) % pattern)

    def _read_window(self) -> int:
        """Return the side of a window in pixels."""
        return _WINDOW_PIXELS

    def order(self, grid: PatchGrid) -> NDArray[np.int32]:
        order = super().order(grid)
        if not self._has_windows:
            return order
        return order.reshape(-1, self.merge**2)[self._windows(grid)[0]].reshape(-1)

    def _windows(self, grid: PatchGrid) -> tuple[NDArray[np.int32], Windows]:
        """Return the order of the tokens by windows, and the windows, in patches."""
        order, windows = window_order(grid.nx // self.merge, grid.ny // self.merge, self._window)
        return order, Windows(tuple((count, n * self.merge**2) for count, n in windows.groups))

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        arrays = super().arrays(grid, order)
        return {**arrays, TOKENS: np.argsort(self._windows(grid)[0]).astype(np.int32)} if self._has_windows else arrays

    def build(self, shape: tuple[int, ...]) -> Graph:
        if not self._has_windows:
            return super().build(shape)
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        _, windows = self._windows(grid)
        x = self._transformer(
            step,
            self._patches(step, grid.n),
            rotate_halves(step, grid.n, THETA),
            lambda layer: None if layer in self._full else windows,
        )
        x = self._project(step, x)
        step.graph.output(EMBEDDINGS, get_rows(x, step.input(TOKENS, self.n_tokens(grid), type=TensorType.I32)))
        return step.graph


class Exaone45Encoder(Qwen25VlEncoder):
    """EXAONE 4.5: as Qwen2.5-VL, with fewer heads of keys than of queries (models/exaone4_5.cpp)."""

    texts = "<vision>", "</vision>"

    def _read_full_layers(self, n_layer: int) -> frozenset[int]:
        return self._each(self.keys.int_("n_wa_pattern", 0), n_layer)

    def _take_limits(self) -> None:
        self.options = limited_by_file(self.keys, image_options(self.keys, self.merge))


class LearnedQwenVlEncoder(Qwen2VlEncoder):
    """Base of encoders with learned positions, too, of which those of other grids are interpolated."""

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        side = isqrt(weights.ne("v.position_embd.weight")[1])
        table = weights.shared.require("v.position_embd.weight", self._transformer.n_embd, side * side)
        self._positions = PositionTable(table, side, side, Interpolation.BILINEAR_CORNERS)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        return {**super().arrays(grid, order), ORDER: order, **self._positions.arrays(*grid)}

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        order = step.input(ORDER, grid.n, type=TensorType.I32)
        x = add(self._patches(step, grid.n), self._positions.rows(step, *grid, order), "pos_embed")
        step.graph.output(EMBEDDINGS, self._encode(step, x, rotate_halves(step, grid.n, THETA)))
        return step.graph

    def _encode(self, step: EncoderPass, x: Tensor, rotate: Rotate) -> Tensor:
        """Return the embeddings for the patches."""
        return self._project(step, self._transformer(step, x, rotate))


class Qwen3VlEncoder(LearnedQwenVlEncoder):
    """Qwen3-VL: embeddings of some layers beside those of the last (DeepStack)."""

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        weights.shared.require("v.patch_embd.bias", self._transformer.n_embd)
        n = self._transformer.n_embd * self.merge**2
        self._deep: dict[int, tuple[LayerNorm, Projection]] = {}
        for i in range(len(self._transformer.layers)):
            name = f"v.deepstack.{i}"
            if weights.has(f"{name}.fc1.weight"):
                norm = LayerNorm.take(weights.shared, f"{name}.norm", n)
                projection = Projection.take(weights.shared, f"{name}.fc1", f"{name}.fc2", n)
                if projection.n_out != self._projection.n_out:
                    raise InvalidModel(
                        f"'{name}.fc2.weight' has {projection.n_out} rows; {self._projection.n_out} are expected"
                    )
                self._deep[i] = norm, projection
        self.n_embd = self._projection.n_out * (1 + len(self._deep))

    def _encode(self, step: EncoderPass, x: Tensor, rotate: Rotate) -> Tensor:
        deep: list[Tensor] = []

        def on_layer(layer: int, x: Tensor) -> None:
            if layer in self._deep:
                norm, projection = self._deep[layer]
                h = norm(step, merge_rows(x, self.merge**2), f"deepstack_norm-{layer}")
                deep.append(projection(step, h, f"deepstack-{layer}"))

        x = self._project(step, self._transformer(step, x, rotate, on_layer=on_layer))
        for part in deep:
            x = concat(x, part, 0)
        return x


class Ling3VlEncoder(LearnedQwenVlEncoder):
    """Ling 3 VL: patches are normed before they are merged (models/ling3vl.cpp)."""

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        self._norm = LayerNorm.take(weights.shared, "mm.input_norm", self._transformer.n_embd)

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        return super()._project(step, self._norm(step, x, "input_norm"))


class YoutuVlEncoder(Qwen25VlEncoder):
    """Youtu-VL: layer norms, and windows of other sizes in other layers (models/youtuvl.cpp)."""

    norm = NormKind.LAYER

    def _take_weights(self, weights: Weights) -> None:
        super()._take_weights(weights)
        self._norm = RmsNorm.take(weights.shared, "mm.input_norm", self._transformer.n_embd)

    def _take_patches(self, weights: Weights, n_embd: int) -> FramePairEmbedding | FlatPatchEmbedding:
        return FlatPatchEmbedding(weights.shared.linear("v.patch_embd", 3 * self.patch**2, n_embd))

    def _take_limits(self) -> None:
        options = image_options(self.keys, self.merge, Resize(ResizeFilter.BILINEAR, PadStyle.NONE))
        self.options = limited_by_tokens(self.keys, options, 1, 62_500)

    def _read_full_layers(self, n_layer: int) -> frozenset[int]:
        name = "wa_layer_indexes"
        if not self.keys.has(name):
            raise InvalidModel(f"metadata key '{self.keys.name(name)}' is missing")
        found = self.keys.ints(name)
        return frozenset(found or range(n_layer)) & frozenset(range(n_layer))

    def _read_window(self) -> int:
        return self.keys.int_("window_size")

    def preprocess(self, media: Media) -> PreparedPicture:
        return youtuvl(media, self.options)

    def cut(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the patches row by row, as rows of pixels with the colors of each side by side."""
        height, width, colors = pixels.shape
        p = self.patch
        tiles = pixels.reshape(height // p, p, width // p, p, colors)
        return tiles.transpose(0, 2, 1, 3, 4).reshape(-1, colors * p * p)

    def _project(self, step: EncoderPass, x: Tensor) -> Tensor:
        return super()._project(step, self._norm(step.with_eps(1e-6), x, "input_norm"))
