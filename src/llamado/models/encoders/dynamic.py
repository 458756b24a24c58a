"""Encoders that resize a picture to one image, whose size keeps the aspect ratio, between two texts."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from llamado.media.chunks import Grid, MediaChunk, Piece, PositionLayout
from llamado.media.media import Media, MediaKind
from llamado.media.preprocessing import ImageOptions, PreparedPicture, dyn_size
from llamado.media.resize import PADDED, Resize
from llamado.models.encoders.grids import GridEncoder, PatchGrid
from llamado.models.encoders.keys import EncoderKeys
from llamado.models.errors import InvalidModel, UnsupportedModel


class DynamicEncoder(GridEncoder):
    """Encoder of images of any size; a picture becomes one, and squares of `merge` patches become one token.

    `texts` stand before and behind it in a prompt. Unless it `has_rows`, the tokens are one row in models with M-RoPE.
    """

    texts: ClassVar[tuple[str, str]]
    has_rows: ClassVar[bool] = True
    options: ImageOptions

    def prepare(self, media: Media) -> list[Piece]:
        return [self.texts[0], self.chunk(media, self.preprocess(media).image), self.texts[1]]

    def chunk(self, media: Media, pixels: NDArray[np.float32], *part: object) -> MediaChunk:
        """Return the chunk for a prepared picture, or for a `part` of one. Raises MediaError."""
        given = self.input(pixels)
        grid = PatchGrid(*given.shape)
        return MediaChunk(
            kind=MediaKind.IMAGE,
            input=given,
            n_tokens=self.n_tokens(grid),
            digest=self.digest(media, *part),
            layout=self.layout(grid),
            causal=self.causal,
        )

    def preprocess(self, media: Media) -> PreparedPicture:
        """Resize and normalize a picture. Raises MediaError."""
        return dyn_size(media, self.options)

    def n_tokens(self, grid: PatchGrid) -> int:
        return grid.n // self.merge**2

    def layout(self, grid: PatchGrid) -> PositionLayout:
        """Return the positions of the tokens in models with M-RoPE."""
        if not self.has_rows:
            return Grid(self.n_tokens(grid), 1)
        return Grid(grid.nx // self.merge, grid.ny // self.merge)

    def take_sizes(self, merge: int | None = None) -> None:
        """Read the sizes of patches and of the squares that are merged, `spatial_merge_size` if `merge` is None.

        Raises GgufError, InvalidModel or UnsupportedModel.
        """
        self.patch = self.keys.int_("patch_size")
        self.merge = self.keys.int_("spatial_merge_size", 2) if merge is None else merge
        if merge is None and self.merge != 2:
            raise UnsupportedModel(f"'{self.keys.name('spatial_merge_size')}' is {self.merge}; 2 is expected")


def image_options(keys: EncoderKeys, merge: int, resize: Resize = PADDED) -> ImageOptions:
    """Return options of preprocessing without limits of pixels. Raises GgufError or InvalidModel."""
    mean, std = keys.colors
    return ImageOptions(
        image_size=keys.int_("image_size"),
        patch_size=keys.int_("patch_size"),
        mean=mean,
        std=std,
        n_merge=merge,
        resize=resize,
    )


def limited_by_tokens(keys: EncoderKeys, options: ImageOptions, min_tokens: int, max_tokens: int) -> ImageOptions:
    """Return options with the model's limits, or the user's if there are any."""
    return options.limit_tokens(min_tokens, max_tokens, user_min=keys.min_tokens, user_max=keys.max_tokens)


def limited_by_file(keys: EncoderKeys, options: ImageOptions) -> ImageOptions:
    """Return options with the limits of pixels that the file must have. Raises GgufError or InvalidModel."""
    least, most = (keys.int_(f"image_{which}_pixels") for which in ("min", "max"))
    if not 0 < least <= most:
        raise InvalidModel(f"'{keys.name('image_min_pixels')}' is {least}, and the greatest number of pixels {most}")
    return replace(options, min_pixels=least, max_pixels=most)
