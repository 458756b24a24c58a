"""MiniMax-M3's encoder (clip.cpp, models/minimax-m3.cpp)."""

from __future__ import annotations

from llamado.ggml.graph import Graph, rope_ext
from llamado.ggml.ops import RopeMode, UnaryOp
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import Grid, PositionLayout
from llamado.media.resize import STRETCHED
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_tokens
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid, place_inputs
from llamado.models.encoders.parts.frames import FramePairEmbedding
from llamado.models.encoders.parts.projection import Projection
from llamado.models.encoders.parts.rows import merge_rows
from llamado.models.encoders.parts.transformer import Activation, EncoderTransformer
from llamado.models.errors import InvalidModel
from llamado.models.weights import Weights

_THETA = 10_000.0


class MiniMaxM3Encoder(DynamicEncoder):
    """MiniMax-M3: rotary positions in two thirds of each head; patches are projected, merged and projected again."""

    texts = "]<]start of image[>[", "]<]end of image[>["

    def _take_weights(self, weights: Weights) -> None:
        self.take_sizes()
        self.options = limited_by_tokens(self.keys, image_options(self.keys, self.merge, STRETCHED), 8, 576)
        self._transformer = EncoderTransformer(self.keys, weights, activation=Activation.GELU_ERF)
        n, dim = self._transformer.n_embd, self._transformer.head_dim
        self._n_rotated = 2 * ((2 * (dim // 2) // 3) // 2)
        if not self._n_rotated:
            raise InvalidModel(f"heads of {dim} elements are too narrow for rotary positions")
        self._patches = FramePairEmbedding.take(weights, self.patch, n)
        self._first = Projection.take(weights.shared, "mm.1", "mm.2", n, UnaryOp.GELU_ERF)
        n_merged = self._first.n_out * self.merge**2
        self._second = Projection.take(weights.shared, "mm.merger.fc1", "mm.merger.fc2", n_merged, UnaryOp.GELU_ERF)
        self.n_embd = self._second.n_out

    def layout(self, grid: PatchGrid) -> PositionLayout:
        return Grid(self.n_tokens(grid), 1)

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        rows, columns = place_inputs(step, grid.n)

        def rotate(x: Tensor) -> Tensor:
            """Rotate the second part of a head by the row and the third by the column; the first is for time."""
            n = self._n_rotated
            for i, places in enumerate((rows, columns)):
                x = rope_ext(x, places, None, n, RopeMode.NEOX, 0, _THETA, 1.0, 0.0, 1.0, 0.0, 0.0, offset=(i + 1) * n)
            return x

        x = self._first(step, self._transformer(step, self._patches(step, grid.n), rotate), "projection")
        step.graph.output(EMBEDDINGS, self._second(step, merge_rows(x, self.merge**2), "merger"))
        return step.graph
