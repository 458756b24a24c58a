"""LLaVA (arXiv 2310.03744): CLIP without its last layer, and a network of two layers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.graph import concat, gelu, get_rows, reshape, view_2d
from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput
from llamado.media.resize import Resize
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.patches import ORDER, add_positions
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind, take_norm
from llamado.models.encoders.pictures import Pixels, VitEncoder
from llamado.models.errors import InvalidModel
from llamado.models.weights import Weights

MARGIN = (122, 116, 104)
"""Color of margins: CLIP's mean."""
TOKENS = "tokens"
"""Name of the input with the number of the position that becomes each token of the projector."""


class ClipEncoder(VitEncoder):
    """An encoder whose projector gets the output of a layer before the last, or of several layers.

    The class embedding, if there is one, follows the patches, and the projector gets all positions but the first, as in
    llama.cpp (clip_graph_llava): the second patch is the first token, the class embedding the last.
    """

    resize = Resize(color=MARGIN)
    n_layers_skipped: ClassVar[int] = 1

    def _take_transformer(self, weights: Weights) -> EncoderTransformer:
        n_layer = self.keys.int_("block_count")
        features = set(self.keys.ints("feature_layer"))
        if features and max(features) > n_layer:
            raise InvalidModel(f"'{self.keys.name('feature_layer')}': there is no layer {max(features)} of {n_layer}")
        deepest = max(features, default=-1)
        self._n_used = max(0, n_layer - self.n_layers_skipped) if deepest < 0 else deepest
        self._features = sorted(layer for layer in features if layer >= 0)
        return EncoderTransformer(self.keys, weights, n_layer=self._n_used)

    def _take_projector(self, weights: Weights) -> None:
        self.side = self.require_squares()
        n = self.transformer.n_embd
        self._class = weights.shared.optional("v.class_embd", n)
        self.require_positions(self.side**2 + (self._class is not None))
        self.n_features = n * max(1, len(self._features))

    def order(self, nx: int, ny: int) -> NDArray[np.int32]:
        return np.arange(nx * ny, dtype=np.int32)

    def tokens(self) -> NDArray[np.int32] | None:
        """Return the numbers of the cells of the grid in the projector's order; None: row by row."""
        return None

    def input(self, pixels: Pixels) -> EncoderInput:
        given = super().input(pixels)
        arrays = dict(given.arrays)
        has_class = self._class is not None
        if has_class:
            arrays[ORDER] = np.append(arrays[ORDER], np.int32(arrays[ORDER].size))
        tokens = self.tokens()
        if tokens is not None:
            arrays[TOKENS] = tokens + np.int32(has_class)
        return EncoderInput(given.shape, arrays)

    def encode(self, step: EncoderPass, shape: tuple[int, ...]) -> Tensor:
        (n_patches,) = shape
        x = self.patches(step, n_patches)
        if self._class is not None:
            x = concat(x, reshape(self._class, x.ne[0], 1), 1)
        x = self._run(step, add_positions(step, x, self.table))
        if self.tokens() is not None:
            return get_rows(x, step.input(TOKENS, n_patches, type=TensorType.I32))
        return x if self._class is None else view_2d(x, x.ne[0], n_patches, x.nb[1], x.nb[1])

    def _run(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return the outputs of the layers that the projector gets, side by side: F32 [n_features, n_positions]."""
        transformer = self.transformer
        before = x if transformer.pre_norm is None else transformer.pre_norm(step, x, "pre_ln")
        outputs = {0: before}

        def keep(layer: int, output: Tensor) -> None:
            outputs[layer + 1] = output

        outputs[self._n_used] = transformer(step, x, on_layer=keep)
        found = outputs[self._features[0] if self._features else self._n_used]
        for layer in self._features[1:]:
            found = concat(found, outputs[layer], 0)
        return found


class LlavaEncoder(ClipEncoder):
    """LLaVA 1.5 and 1.6, BakLLaVA, Yi-VL (with norms), Granite Vision (with several layers' outputs)."""

    def _take_projector(self, weights: Weights) -> None:
        super()._take_projector(weights)
        w = weights.shared
        n_hidden = weights.ne("mm.0.weight")[1]
        self._first = w.linear("mm.0", self.n_features, n_hidden)
        self._has_norms = weights.has("mm.3.weight")
        last = "mm.3" if self._has_norms else "mm.2"
        self.n_embd = weights.ne(f"{last}.weight")[1]
        self._last = w.linear(last, n_hidden, self.n_embd)
        if self._has_norms:
            self._norm = take_norm(w, "mm.1", n_hidden, NormKind.LAYER)
            self._last_norm = take_norm(w, "mm.4", self.n_embd, NormKind.LAYER)

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = self._first(step, x, "projection_1")
        if not self._has_norms:
            return self._last(step, gelu(x), "projection_2")
        x = self._last(step, gelu(self._norm(step, x, "projection_norm_1")), "projection_2")
        return self._last_norm(step, x, "projection_norm_2")
