"""Phi-4 reasoning vision: SigLIP 2 for pictures of any size, and a network of two layers."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import gelu
from llamado.ggml.tensor import Tensor
from llamado.media.media import Media
from llamado.media.preprocessing import ImageOptions, PreparedPicture, dyn_size
from llamado.media.resize import Resize, ResizeFilter
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.pictures import ResizingEncoder, check_limits
from llamado.models.weights import Weights


class Phi4Encoder(ResizingEncoder):
    """Each patch is a token."""

    resize = Resize(ResizeFilter.BILINEAR)

    def _image_options(self) -> ImageOptions:
        fewest, most = self.keys.int_("image_min_pixels"), self.keys.int_("image_max_pixels")
        return check_limits(replace(super()._image_options(), min_pixels=fewest, max_pixels=most))

    def preprocess(self, media: Media) -> PreparedPicture:
        return dyn_size(media, self.options)

    def _take_projector(self, weights: Weights) -> None:
        n_hidden, self.n_embd = weights.ne("mm.0.weight")[1], weights.ne("mm.2.weight")[1]
        self._first = weights.shared.linear("mm.0", self.transformer.n_embd, n_hidden)
        self._second = weights.shared.linear("mm.2", n_hidden, self.n_embd)

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        return self._second(step, gelu(self._first(step, x, "projection_1")), "projection_2")
