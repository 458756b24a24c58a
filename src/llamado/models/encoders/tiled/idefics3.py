"""Idefics 3 and SmolVLM (arXiv 2504.05299): SigLIP, squares of patches joined to a row, and one matrix."""

from __future__ import annotations

from dataclasses import replace

from llamado.ggml.tensor import Tensor
from llamado.media.chunks import TokenText
from llamado.media.media import Media
from llamado.media.preprocessing import ImageOptions, PreparedPicture
from llamado.media.resize import Resize, ResizeFilter
from llamado.media.tiling import idefics3
from llamado.models.encoders.encoder import EncoderPass
from llamado.models.encoders.pictures import MOST_TILES, VitEncoder, join
from llamado.models.encoders.texts import PictureTexts
from llamado.models.errors import InvalidModel
from llamado.models.weights import Weights


class Idefics3Encoder(VitEncoder):
    """A picture is an overview and tiles, all of one size."""

    resize = Resize(ResizeFilter.LANCZOS)
    texts = PictureTexts(
        overview_begin=(TokenText("\n\n"), TokenText("<fake_token_around_image>"), TokenText("<global-img>")),
        overview_end=(TokenText("<fake_token_around_image>"),),
        tile_text="<fake_token_around_image><row_{row}_col_{column}>",
        row_end=(TokenText("\n"),),
    )

    def _image_options(self) -> ImageOptions:
        edge, tile = self.keys.int_("preproc_image_size", 0), self.keys.int_("image_size")
        if (-(-edge // tile)) ** 2 > MOST_TILES:
            raise InvalidModel(
                f"'{self.keys.name('preproc_image_size')}' is {edge}: too many tiles of {tile} pixels; "
                f"at most {MOST_TILES} are supported"
            )
        return self.limit_tokens(replace(super()._image_options(), longest_edge=edge))

    def preprocess(self, media: Media) -> PreparedPicture:
        return idefics3(media, self.options)

    def _take_projector(self, weights: Weights) -> None:
        self.merge = self.keys.int_("projector.scale_factor", 1)
        self.require_positions(self.require_squares() ** 2)
        self.n_embd = weights.ne("mm.model.fc.weight")[1]
        n_in = self.transformer.n_embd * self.merge**2
        self._projection = weights.shared.linear("mm.model.fc", n_in, self.n_embd)

    def project(self, step: EncoderPass, x: Tensor) -> Tensor:
        return self._projection(step, join(x, self.merge**2, "pixel_shuffle"), "projection")
