"""Resizing, padding and normalizing of pictures, bit for bit as mtmd-image.cpp does.

llama.cpp's resampling (img_tool::resize_pillow) computes what Pillow does for columns, then for rows.
"""

from __future__ import annotations

import math
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.media.errors import MediaError

MAX_SIDE = 65536
"""Longest side of a resized picture, as in mtmd-image.cpp."""


class Size(NamedTuple):
    """Size of a picture in pixels."""

    width: int
    height: int


class ResizeFilter(Enum):
    """Resampling filter (resize_algo), by Pillow's number."""

    BILINEAR = 2
    BICUBIC = 3
    LANCZOS = 1


class PadStyle(Enum):
    """Fitting of a picture into a size of another aspect ratio (pad_style).

    NONE: stretch it. CEIL: keep the aspect ratio, round the size up, pad left and right, or above and below. NEAREST:
    as CEIL, but round to the nearest size, as Pillow's ImageOps.pad does.
    """

    NONE = "none"
    CEIL = "ceil"
    NEAREST = "nearest"


class Resize(NamedTuple):
    """Parameters of `resize`; `color` is that of the padding."""

    filter: ResizeFilter = ResizeFilter.BICUBIC
    pad: PadStyle = PadStyle.CEIL
    color: tuple[int, int, int] = (0, 0, 0)


PADDED = Resize()
STRETCHED = Resize(pad=PadStyle.NONE)


def size_of(picture: NDArray[np.uint8]) -> Size:
    """Return the size of a picture, uint8 [h, w, 3]."""
    height, width, _ = picture.shape
    return Size(width, height)


def resize(picture: NDArray[np.uint8], size: Size, how: Resize) -> NDArray[np.uint8]:
    """Return a picture, uint8 [h, w, 3], in another size. Raises MediaError if a side would be 0 or too long."""
    old = size_of(picture)
    if size == old:
        return picture
    if how.pad is PadStyle.NONE:
        return _resample(picture, size, how.filter)
    scale = min(np.float32(size.width) / np.float32(old.width), np.float32(size.height) / np.float32(old.height))
    width, height = (np.float32(side) * scale for side in old)
    is_nearest = how.pad is PadStyle.NEAREST
    fit = round_half_up if is_nearest else math.ceil
    inner = Size(min(fit(width), size.width), min(fit(height), size.height))
    margins = size.width - inner.width, size.height - inner.height
    left, top = ((margin + 1) // 2 if is_nearest else margin // 2 for margin in margins)
    padded = np.empty((size.height, size.width, 3), np.uint8)
    padded[:] = how.color
    padded[top : top + inner.height, left : left + inner.width] = _resample(picture, inner, how.filter)
    return padded


def _resample(picture: NDArray[np.uint8], size: Size, filter: ResizeFilter) -> NDArray[np.uint8]:
    """Return a picture stretched to a size. Raises MediaError."""
    old = size_of(picture)
    if not (0 < size.width <= MAX_SIDE and 0 < size.height <= MAX_SIDE):
        raise MediaError(
            f"a picture of {old.width} × {old.height} pixels would have to be resized to {size.width} × {size.height}: "
            "crop it to sides of more similar lengths"
        )
    from PIL import Image

    # Columns before rows, as in mtmd-image.cpp: in one call, Pillow 13 takes the order that is faster for the sizes.
    between = Image.fromarray(picture).resize((size.width, old.height), Image.Resampling(filter.value))
    return np.asarray(between.resize(size, Image.Resampling(filter.value)))


def round_half_up(x: float | np.float32) -> int:
    """Return std::round of a number that is not below zero."""
    floor = math.floor(x)
    return floor + (float(x) - floor >= 0.5)


def normalize(picture: NDArray[np.uint8], mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """Return (picture / 255 - mean) / std for each color: float32 [h, w, 3]."""
    height, width, _ = picture.shape
    values = picture.reshape(height, -1).astype(np.float32)
    values /= np.float32(255)
    # Whole rows, since numpy is slow at operands of three values.
    values -= np.tile(np.array(mean, np.float32), width)
    values /= np.tile(np.array(std, np.float32), width)
    return values.reshape(picture.shape)
