"""LFM2-VL: SigLIP 2 for pictures of any size, and a network of two layers over squares of patches."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.graph import add, gelu, mul, norm
from llamado.ggml.tensor import Tensor
from llamado.media.chunks import TokenText
from llamado.media.media import Media
from llamado.media.preprocessing import ImageOptions, PreparedPicture
from llamado.media.resize import Resize, ResizeFilter
from llamado.media.tiling import LFM2_TILE, lfm2
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.pictures import ResizingEncoder, join
from llamado.models.encoders.texts import PictureTexts
from llamado.models.errors import UnsupportedModel
from llamado.models.weights import Weights


class Lfm2Encoder(ResizingEncoder):
    """A small picture is one part, a large one has tiles and an overview."""

    resize = Resize(ResizeFilter.BILINEAR)
    texts = PictureTexts(
        begin="<|image_start|>",
        end="<|image_end|>",
        overview_begin=(TokenText("<|img_thumbnail|>"),),
        tile_text="<|img_row_{row}_col_{column}|>",
    )

    def _image_options(self) -> ImageOptions:
        options, bilinear = super()._image_options(), ResizeFilter.BILINEAR
        overview, refined = (how._replace(filter=bilinear) for how in (options.resize_overview, options.resize_refined))
        return self.limit_tokens(replace(options, resize_overview=overview, resize_refined=refined), 64, 256)

    def preprocess(self, media: Media) -> PreparedPicture:
        return lfm2(media, self.options)

    def _take_projector(self, weights: Weights) -> None:
        self.merge = self.keys.int_("projector.scale_factor", 1)
        if LFM2_TILE % (self.patch * self.merge):
            raise UnsupportedModel(f"tiles of {LFM2_TILE} pixels with tokens of {self.patch * self.merge}")
        w, n_in = weights.shared, self.transformer.n_embd * self.merge**2
        self._norm_weight = w.optional("mm.input_norm.weight", n_in)
        self._norm_bias = w.optional("mm.input_norm.bias", n_in)
        n_hidden, self.n_embd = weights.ne("mm.1.weight")[1], weights.ne("mm.2.weight")[1]
        self._first = w.linear("mm.1", n_in, n_hidden)
        self._second = w.linear("mm.2", n_hidden, self.n_embd)

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        x = join(x, self.merge**2, "pixel_shuffle")
        if self._norm_weight is not None:
            x = mul(norm(x, 1e-5), self._norm_weight, "input_norm")
        if self._norm_bias is not None:
            x = add(x, self._norm_bias, "input_norm")
        return self._second(step, gelu(self._first(step, x, "projection_1")), "projection_2")
