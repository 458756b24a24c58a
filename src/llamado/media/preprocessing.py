"""Preprocessing of pictures that become one image: resized to one size, or to a size that keeps the aspect ratio.

Each function is one strategy of llama.cpp (mtmd-image.h) and equals it bit for bit; `tiling` has those that cut a
picture into tiles. An encoder chooses the strategy and its options.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.media.media import Media
from llamado.media.resize import PADDED, STRETCHED, Resize, Size, normalize, resize, round_half_up, size_of

F32 = np.float32


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Options of preprocessing: the fields of clip_hparams that mtmd-image.cpp reads. Each strategy reads some of them.

    `n_merge`: patches of a side that become one token. `min_pixels`, `max_pixels`: of the resized picture; 0: no
    limit. `resize_overview` and `resize_refined`: for the overview, and for the picture that is cut into tiles.
    `resolutions`: sizes to choose from (image_grid_pinpoints). `tile_size`: DeepSeek-OCR's tiles; others have tiles of
    `image_size`. `max_tokens`, `max_aspect_ratio`: DeepSeek V4's limits.
    """

    image_size: int
    patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    n_merge: int = 1
    min_pixels: int = 0
    max_pixels: int = 0
    longest_edge: int = 0
    resize: Resize = PADDED
    resize_overview: Resize = STRETCHED
    resize_refined: Resize = PADDED
    resolutions: tuple[Size, ...] = ()
    min_tiles: int = 0
    max_tiles: int = 0
    tile_size: int = 0
    max_tokens: int = 0
    max_aspect_ratio: int = 0

    @property
    def align(self) -> int:
        """Pixels of a side that become one token."""
        return self.patch_size * self.n_merge

    def limit_tokens(
        self, min_tokens: int = 0, max_tokens: int = 0, *, user_min: int = 0, user_max: int = 0
    ) -> ImageOptions:
        """Return options with the model's limits of tokens in place of those of pixels (set_limit_image_tokens).

        The user's limits go before the model's. 0: keep what there is.
        """
        minimum, maximum = user_min or min_tokens, user_max or max_tokens
        return replace(
            self,
            min_pixels=minimum * self.align**2 if minimum > 0 else self.min_pixels,
            max_pixels=maximum * self.align**2 if maximum > 0 else self.max_pixels,
        )

    def normalize(self, picture: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return a picture normalized by `mean` and `std`: float32 [h, w, 3]."""
        return normalize(picture, self.mean, self.std)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPicture:
    """Result of preprocessing: normalized images, each float32 [h, w, 3].

    `images` are the tiles in rows, top to bottom, if `columns` and `rows` are not 0. `overview` is the whole picture
    beside them, or alone.
    """

    images: tuple[NDArray[np.float32], ...] = ()
    overview: NDArray[np.float32] | None = None
    columns: int = 0
    rows: int = 0

    @property
    def image(self) -> NDArray[np.float32]:
        """The image, if it is the only one."""
        (only,) = self.images
        return only


class Preprocess(Protocol):
    """A strategy. Raises MediaError if a picture cannot be brought to a valid size."""

    def __call__(self, media: Media, options: ImageOptions) -> PreparedPicture: ...


def fixed_size(media: Media, options: ImageOptions) -> PreparedPicture:
    """Resize to a square of `image_size`. Reads `resize`."""
    size = Size(options.image_size, options.image_size)
    return PreparedPicture((options.normalize(resize(media.data, size, options.resize)),))


def dyn_size(media: Media, options: ImageOptions) -> PreparedPicture:
    """Resize to multiples of `align` between `min_pixels` and `max_pixels`, keeping the ratio. Reads `resize`."""
    size = keep_ratio(size_of(media.data), options.align, options.min_pixels, options.max_pixels)
    return PreparedPicture((options.normalize(resize(media.data, size, options.resize)),))


def longest_edge(media: Media, options: ImageOptions) -> PreparedPicture:
    """Resize so that the longer side has `longest_edge` pixels, then as `dyn_size`. Reads `resize`."""
    limits = options.min_pixels, options.max_pixels, options.longest_edge
    size = keep_ratio(size_of(media.data), options.align, *limits)
    return PreparedPicture((options.normalize(resize(media.data, size, options.resize)),))


def keep_ratio(size: Size, align: int, min_pixels: int = 0, max_pixels: int = 0, longest_edge: int = 0) -> Size:
    """Return the size with sides in multiples of `align` that keeps the aspect ratio and the limits; 0: no limit.

    This is img_tool::calc_size_preserved_ratio, "smart_resize" in Transformers. `longest_edge` comes first, so that
    `min_pixels` may exceed it.
    """
    if longest_edge > 0:
        scale = min(F32(longest_edge) / F32(size.width), F32(longest_edge) / F32(size.height))
        width, height = (_multiple(math.ceil, F32(side) * scale, align) for side in size)
    else:
        width, height = (max(align, _multiple(round_half_up, F32(side), align)) for side in size)
    area = F32(size.height) * F32(size.width)
    if 0 < max_pixels < width * height:
        factor = np.sqrt(area / F32(max_pixels))
        width, height = (max(align, _multiple(math.floor, F32(side) / factor, align)) for side in size)
    elif width * height < min_pixels:
        factor = np.sqrt(F32(min_pixels) / area)
        width, height = (_multiple(math.ceil, F32(side) * factor, align) for side in size)
    return Size(width, height)


class _Round(Protocol):
    def __call__(self, x: np.float32, /) -> int: ...


def _multiple(round: _Round, x: np.float32, factor: int) -> int:
    return round(x / F32(factor)) * factor
