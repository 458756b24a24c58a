"""MiMo-VL's encoder, that of MiMo-V2.5 (clip.cpp, models/mimovl.cpp)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import Graph, get_rows, reshape
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.encoders.any_size.qwen_vl import THETA, VISION_TEXTS
from llamado.models.encoders.dynamic import DynamicEncoder, image_options, limited_by_file
from llamado.models.encoders.encoder import EMBEDDINGS, EncoderPass
from llamado.models.encoders.grids import PatchGrid
from llamado.models.encoders.parts.bands import Band
from llamado.models.encoders.parts.frames import FramePairEmbedding
from llamado.models.encoders.parts.projection import Projection
from llamado.models.encoders.parts.rotation import grid_positions, rotate_halves
from llamado.models.encoders.parts.rows import merge_rows
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind
from llamado.models.errors import InvalidModel
from llamado.models.forward import Linear
from llamado.models.parts.norms import LayerNorm
from llamado.models.weights import RoleWeights, Weights

_ROW_POSITIONS, _COLUMN_POSITIONS = "row_positions", "column_positions"
_BY_COLUMN, _BY_ROW = "by_column", "by_row"
"""Names of inputs: positions of patches in both orders, and the orders of tokens, each in terms of the other."""
_POST_EPS = 1e-6


class Order(IntEnum):
    """Patches that a layer's attention reaches: all, or those near by in an order of the tokens."""

    ALL = -1
    ROWS = 0
    COLUMNS = 1


class MimoVlEncoder(DynamicEncoder):
    """MiMo-VL: attention in a band along the rows or the columns of tokens, with attention sinks, in most layers."""

    texts = VISION_TEXTS

    def _take_weights(self, weights: Weights) -> None:
        self.take_sizes()
        keys, shared = self.keys, weights.shared
        self.options = limited_by_file(keys, image_options(keys, self.merge))
        n_heads = keys.int_("attention.head_count") + 2 * keys.int_("attention.head_count_kv")
        dim, rest = divmod(weights.ne("v.blk.0.attn_qkv.weight")[1], n_heads)
        if rest:
            raise InvalidModel(f"the rows of 'v.blk.0.attn_qkv.weight' are not divisible by {n_heads} heads")
        self._transformer = EncoderTransformer(keys, weights, norm=NormKind.RMS, head_dim=dim)
        self._transformer.pre_norm = self._transformer.post_norm = None
        n = self._transformer.n_embd
        self._post_norm = LayerNorm.take(shared, "v.post_ln", n)
        self._reach = keys.int_("window_size")
        orders = keys.ints("wa_pattern_mode")
        if len(orders) != len(self._transformer.layers):
            raise InvalidModel(
                f"'{keys.name('wa_pattern_mode')}' has {len(orders)} values; "
                f"{len(self._transformer.layers)} are expected"
            )
        self._orders = [Order(order) if order in (-1, 1) else Order.ROWS for order in orders]
        for layer, order in zip(self._transformer.layers, self._orders, strict=True):
            if order is not Order.ALL and layer.attention.sinks is None:
                raise InvalidModel("a layer with a band has no tensor 'attn_sinks'")
        self._patches = FramePairEmbedding.take(weights, self.patch, n)
        self._projection = _take_projection(shared, n * self.merge**2, weights)
        self.n_embd = self._projection.n_out

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        nx, ny = grid.nx // self.merge, grid.ny // self.merge
        by_column = np.arange(nx * ny, dtype=np.int32).reshape(ny, nx).T.reshape(-1)
        turned = order.reshape(-1, self.merge**2)[by_column].reshape(-1)
        return {
            _ROW_POSITIONS: grid_positions(order // grid.nx, order % grid.nx),
            _COLUMN_POSITIONS: grid_positions(turned // grid.nx, turned % grid.nx),
            _BY_COLUMN: np.ascontiguousarray(by_column),
            _BY_ROW: np.argsort(by_column).astype(np.int32),
            **Band(grid.n, self._reach).arrays(),
        }

    def build(self, shape: tuple[int, ...]) -> Graph:
        grid = PatchGrid(*shape)
        step = EncoderPass(self._transformer.norm_eps)
        band = Band(grid.n, self._reach).of(step)
        rotations = {
            Order.ROWS: rotate_halves(step, grid.n, THETA, _ROW_POSITIONS),
            Order.COLUMNS: rotate_halves(step, grid.n, THETA, _COLUMN_POSITIONS),
        }
        x, now = self._patches(step, grid.n), Order.ROWS
        for i, (layer, order) in enumerate(zip(self._transformer.layers, self._orders, strict=True)):
            wanted = Order.COLUMNS if order is Order.COLUMNS else Order.ROWS
            x, now = self._ordered(step, x, now, wanted), wanted
            if order is Order.ALL:
                layer = layer._replace(attention=layer.attention._replace(sinks=None))
            x = layer(step, x, rotations[now], None if order is Order.ALL else band, str(i))
        x = self._post_norm(step.with_eps(_POST_EPS), self._ordered(step, x, now, Order.ROWS), "post_ln")
        step.graph.output(EMBEDDINGS, self._projection(step, merge_rows(x, self.merge**2), "projection"))
        return step.graph

    def _ordered(self, step: EncoderPass, x: Tensor, now: Order, wanted: Order) -> Tensor:
        """Return the hidden states of the patches in another order of the tokens."""
        if now is wanted:
            return x
        tokens = merge_rows(x, self.merge**2)
        name = _BY_COLUMN if wanted is Order.COLUMNS else _BY_ROW
        ids = step.input(name, tokens.ne[1], type=TensorType.I32)
        return reshape(get_rows(tokens, ids), *x.ne[:2])


def _take_projection(w: RoleWeights, n_in: int, weights: Weights) -> Projection:
    """Take the projection; biases are not used, as in clip.cpp."""
    n_between, n_out = weights.ne("mm.0.weight")[1], weights.ne("mm.2.weight")[1]
    up, down = w.require("mm.0.weight", n_in, n_between), w.require("mm.2.weight", n_between, n_out)
    return Projection(Linear(up), Linear(down))
