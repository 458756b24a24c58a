"""Preprocessing of pictures to one image whose size follows the rules of a particular model.

As in `preprocessing`, each function equals the strategy of llama.cpp (mtmd-image.h) that has its name.
"""

from __future__ import annotations

import math

import numpy as np

from llamado.media.errors import MediaError
from llamado.media.media import Media
from llamado.media.preprocessing import F32, ImageOptions, PreparedPicture
from llamado.media.resize import PadStyle, Size, resize, round_half_up, size_of


def glm5v(media: Media, options: ImageOptions) -> PreparedPicture:
    """Put the picture on the upper left of a black canvas, whose sides are the next multiples of `align`.

    It is scaled down if the canvas has more than `max_pixels`, and up if it has less than `min_pixels`. Reads the
    filter of `resize`.
    """
    width, height = size_of(media.data)
    canvas = _glm5v_canvas(Size(width, height), options)
    scale = min(canvas.height / height, canvas.width / width)
    if height * width >= options.min_pixels:
        scale = min(1.0, scale)
    inner = Size(
        *(max(1, min(most, math.floor(side * scale))) for side, most in zip((width, height), canvas, strict=True))
    )
    pixels = np.zeros((canvas.height, canvas.width, 3), np.uint8)
    pixels[: inner.height, : inner.width] = resize(media.data, inner, options.resize._replace(pad=PadStyle.NONE))
    return PreparedPicture((options.normalize(pixels),))


def _glm5v_canvas(size: Size, options: ImageOptions) -> Size:
    def aligned(side: int) -> int:
        return -(-side // options.align) * options.align

    width, height = size
    canvas = Size(aligned(width), aligned(height))
    if canvas.width * canvas.height < options.min_pixels:
        scale = math.sqrt(options.min_pixels / (height * width))
        canvas = Size(*(aligned(max(1, math.ceil(side * scale))) for side in size))
    if canvas.width * canvas.height <= options.max_pixels:
        return canvas
    found, low, high = Size(options.align, options.align), 1, height
    while low <= high:
        middle = (low + high) // 2
        canvas = Size(aligned(max(1, width * middle // height)), aligned(middle))
        if canvas.width * canvas.height <= options.max_pixels:
            found, low = canvas, middle + 1
        else:
            high = middle - 1
    return found


def youtuvl(media: Media, options: ImageOptions) -> PreparedPicture:
    """Scale the picture down in steps of 2 % until it has at most `max_pixels`, with sides in multiples of `align`.

    0 pixels: 256 patches. Reads `resize`, but pads with black.
    """
    size = size_of(media.data)
    patch_area = options.patch_size**2
    most = options.max_pixels // patch_area if options.max_pixels > 0 else 256
    scale = F32(1)
    while scale > 0:
        sides = (math.ceil(F32(side) * scale / F32(options.align)) for side in size)
        target = Size(*(max(1, side) * options.align for side in sides))
        if (target.width // options.patch_size) * (target.height // options.patch_size) <= most:
            break
        scale -= F32(0.02)
    how = options.resize._replace(color=(0, 0, 0))
    return PreparedPicture((options.normalize(resize(media.data, target, how)),))


def muse_glimmer(media: Media, options: ImageOptions) -> PreparedPicture:
    """Stretch the picture to the grid of tokens that has the nearest aspect ratio and at most `max_pixels`.

    Reads the filter of `resize`.
    """
    width, height = size_of(media.data)
    most = options.max_pixels // options.align**2
    rows, columns = height / options.align, width / options.align
    if rows * columns > most:
        ratio = columns / rows
        rows = math.sqrt(most / ratio)
        columns = rows * ratio
    grid = _nearest_grid(rows, columns, height / width, most)
    target = Size(grid.width * options.align, grid.height * options.align)
    stretched = resize(media.data, target, options.resize._replace(pad=PadStyle.NONE))
    return PreparedPicture((options.normalize(stretched),))


def _nearest_grid(rows: float, columns: float, ratio: float, most: int) -> Size:
    """Return the grid next to a fractional one whose ratio of rows to columns is nearest to `ratio`."""
    candidates = [
        Size(m, n)
        for n in (math.floor(rows), math.ceil(rows))
        for m in (math.floor(columns), math.ceil(columns))
        if n >= 1 and m >= 1 and n * m <= most
    ]
    if not candidates:
        return Size(max(1, round_half_up(columns)), max(1, round_half_up(rows)))
    return min(candidates, key=lambda grid: (abs(grid.height / grid.width - ratio), -grid.width * grid.height))


LEAD = 3
"""Most tokens before the block of a picture in DeepSeek V4, which align its beginning to 4 tokens."""


def deepseek4v(media: Media, options: ImageOptions) -> PreparedPicture:
    """Resize to multiples of `patch_size` so that the picture's block has at most `max_tokens`.

    Pictures wider than `max_aspect_ratio` times their height are stretched, others padded, and those of less than
    `min_pixels` scaled up. Reads `n_merge`, and the filter and color of `resize`.
    """
    size = width, height = size_of(media.data)
    ratio = options.max_aspect_ratio
    if ratio > 0:
        width = min(width, height * ratio)
    if width * height < options.min_pixels:
        scale = math.sqrt(options.min_pixels / (width * height))
        width, height = int(width * scale), int(height * scale)
    target = _deepseek4v_size(Size(width, height), options)
    pad = PadStyle.NONE if 0 < ratio * size.height <= size.width else PadStyle.NEAREST
    return PreparedPicture((options.normalize(resize(media.data, target, options.resize._replace(pad=pad))),))


def _deepseek4v_size(size: Size, options: ImageOptions) -> Size:
    p = options.patch_size
    target = Size(*(-(-side // p) * p for side in size))
    most = budget = options.max_tokens - LEAD
    while deepseek4v_tokens(target, options) > most:
        if budget < 4:  # 2 sentinels, and a row of one token and a newline
            raise MediaError(
                f"a picture of {size.width} × {size.height} pixels cannot be fitted into {options.max_tokens} tokens"
            )
        target = _deepseek4v_fit(size, p, options.n_merge, budget)
        budget -= 1
    return target


def _deepseek4v_fit(size: Size, patch_size: int, n_merge: int, budget: int) -> Size:
    """Return the largest size of about `budget` tokens: an even number of rows of tokens, each with a newline."""
    align = patch_size * n_merge
    ratio = size.height / size.width
    columns = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
    rows = columns * ratio
    if columns < 1:
        most = (budget - 2) // 2
        return Size(align, (most - most % 2) * align)
    if rows < 2:
        return Size(max((budget - 2) // 2 - 1, 2) * align, 2 * align)
    most = math.floor(rows)
    scale = min(math.floor(columns) * align / size.width, (most - most % 2) * align / size.height)
    return Size(*(math.floor(side * scale / patch_size) * patch_size for side in size))


def deepseek4v_tokens(size: Size, options: ImageOptions) -> int:
    """Return the tokens of the block of a resized picture, without those that align its beginning.

    Rows of tokens end with a newline, are padded to an even number, and stand between two sentinels.
    """
    columns, rows = (-(-(side // options.patch_size) // options.n_merge) for side in size)
    rows += rows % 2
    n = rows * (columns + 1)
    return n + n // 2 % 2 * 2 + 2
