"""InternVL (arXiv 2404.16821) and Nemotron Nano VL: tiles of one size, squares of patches joined to rows."""

from __future__ import annotations

import numpy as np

from llamado.ggml.graph import add, concat, gelu, mul, norm, relu, reshape, rms_norm, sqr, view_2d
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import EncoderInput
from llamado.media.media import Media
from llamado.media.preprocessing import PreparedPicture, fixed_size
from llamado.media.resize import Size
from llamado.media.tiling import llava_uhd, tile_resolutions
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.parts.patches import ORDER, add_positions
from llamado.models.encoders.parts.transformer import EncoderTransformer, NormKind
from llamado.models.encoders.pictures import Pixels, VitEncoder, join
from llamado.models.encoders.texts import PictureTexts
from llamado.models.errors import InvalidModel
from llamado.models.weights import Weights

WIDTH_WITH_RMS_NORMS, LAYERS_WITH_RMS_NORMS = 3200, 45
"""Size of InternViT-6B, which has RMS norms in place of layer norms."""


class ClassEncoder(VitEncoder):
    """An encoder with a class embedding behind the patches, whose position is the last of the table."""

    def _take_projector(self, weights: Weights) -> None:
        self.merge = self.keys.int_("projector.scale_factor", 1)
        self.require_positions(self.require_squares() ** 2 + 1)
        self._class = weights.shared.require("v.class_embd", self.transformer.n_embd)

    def input(self, pixels: Pixels) -> EncoderInput:
        given = super().input(pixels)
        order = given.arrays[ORDER]
        return EncoderInput(given.shape, {**given.arrays, ORDER: np.append(order, np.int32(order.size))})

    def encode(self, step: EncoderPass, shape: tuple[int, ...]) -> Tensor:
        (n_patches,) = shape
        x = self.patches(step, n_patches)
        x = concat(x, reshape(self._class, x.ne[0], 1), 1)
        return first_rows(self.encode_positions(step, add_positions(step, x, self.table)), n_patches)

    def encode_positions(self, step: EncoderPass, x: Tensor) -> Tensor:
        """Return the output of the transformer: F32 [n_embd, n_patches + 1]."""
        return self.transformer(step, x)


class InternVlEncoder(ClassEncoder):
    """A picture is an overview, and tiles if it is large."""

    texts = PictureTexts(begin="<img>", end="</img>")

    def _resolutions(self) -> tuple[Size, ...]:
        keys = self.keys
        fewest, most = keys.int_("preproc_min_tiles", 1), keys.int_("preproc_max_tiles", 12)
        if fewest > most:
            raise InvalidModel(f"'{keys.name('preproc_min_tiles')}' is {fewest}, more than {most}, the most tiles")
        return (*super()._resolutions(), *tile_resolutions(keys.int_("image_size"), fewest, most))

    def preprocess(self, media: Media) -> PreparedPicture:
        return llava_uhd(media, self.options)

    def _take_transformer(self, weights: Weights) -> EncoderTransformer:
        size = self.keys.int_("embedding_length"), self.keys.int_("block_count")
        has_rms_norms = size == (WIDTH_WITH_RMS_NORMS, LAYERS_WITH_RMS_NORMS)
        return EncoderTransformer(self.keys, weights, norm=NormKind.RMS if has_rms_norms else NormKind.LAYER)

    def _take_projector(self, weights: Weights) -> None:
        super()._take_projector(weights)
        w, n_in = weights.shared, self.transformer.n_embd * self.merge**2
        self._norm = w.require("mm.model.mlp.0.weight", n_in)
        self._norm_bias = w.require("mm.model.mlp.0.bias", n_in)
        n_hidden, self.n_embd = weights.ne("mm.model.mlp.1.weight")[1], weights.ne("mm.model.mlp.3.weight")[1]
        self._first = w.linear("mm.model.mlp.1", n_in, n_hidden)
        self._second = w.linear("mm.model.mlp.3", n_hidden, self.n_embd)

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = join(x, self.merge**2, "pixel_shuffle")
        x = add(mul(norm(x, 1e-5), self._norm), self._norm_bias, "projection_norm")
        return self._second(step, gelu(self._first(step, x, "projection_1")), "projection_2")


class NemotronV2VlEncoder(VitEncoder):
    """RADIO: several class embeddings, which have no positions, in front of the patches."""

    def preprocess(self, media: Media) -> PreparedPicture:
        return fixed_size(media, self.options)

    def _take_projector(self, weights: Weights) -> None:
        self.merge = self.keys.int_("projector.scale_factor", 1)
        self.require_positions(self.require_squares() ** 2)
        w, n = weights.shared, self.transformer.n_embd
        self._classes = w.require("v.class_embd", n, weights.ne("v.class_embd")[1])
        n_in = n * self.merge**2
        self._norm = w.require("mm.model.mlp.0.weight", n_in)
        n_hidden, self.n_embd = weights.ne("mm.model.mlp.1.weight")[1], weights.ne("mm.model.mlp.3.weight")[1]
        self._first = w.require("mm.model.mlp.1.weight", n_in, n_hidden)
        self._second = w.require("mm.model.mlp.3.weight", n_hidden, self.n_embd)

    def encode(self, step: EncoderPass, shape: tuple[int, ...]) -> Tensor:
        (n_patches,) = shape
        x = add_positions(step, self.patches(step, n_patches), self.table)
        x = self.transformer(step, concat(self._classes, x, 1))
        return view_2d(x, x.ne[0], n_patches, x.nb[1], self._classes.ne[1] * x.nb[1])

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = mul(rms_norm(join(x, self.merge**2, "pixel_shuffle"), 1e-6), self._norm, "projection_norm")
        x = sqr(relu(step.mul_mat(self._first, x, "projection_1")))
        return step.mul_mat(self._second, x, "projection_2")


def first_rows(x: Tensor, n: int) -> Tensor:
    """Return the first `n` rows: F32 [ne0, n]."""
    return view_2d(x, x.ne[0], n, x.nb[1])
