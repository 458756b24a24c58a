"""Preprocessing of pictures that are cut into tiles, with an overview beside them.

As in `preprocessing`, each function equals the strategy of llama.cpp (mtmd-image.h) that has its name. Llama 4 is
`llava_uhd` with `square_resolutions`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.media.media import Media
from llamado.media.preprocessing import F32, ImageOptions, PreparedPicture, keep_ratio
from llamado.media.resize import STRETCHED, PadStyle, Resize, ResizeFilter, Size, resize, round_half_up, size_of

MAX_SLICES = 9
"""Most tiles of a picture without `resolutions`."""


class Layout(NamedTuple):
    """Sizes of the overview, of the picture before it is cut, and of the grid of tiles; refined 0 × 0: no tiles."""

    overview: Size
    refined: Size = Size(0, 0)
    grid: Size = Size(0, 0)

    def tiles(self, tile: Size) -> list[tuple[Size, Size]]:
        """Return corner and size of the tiles that cover the picture row by row; those at its end are smaller."""
        return [
            (Size(x, y), Size(min(tile.width, self.refined.width - x), min(tile.height, self.refined.height - y)))
            for y in range(0, self.refined.height, tile.height)
            for x in range(0, self.refined.width, tile.width)
        ]


def _cut(picture: NDArray[np.uint8], tiles: Iterable[tuple[Size, Size]]) -> list[NDArray[np.uint8]]:
    return [picture[y : y + height, x : x + width] for (x, y), (width, height) in tiles]


def _prepare(media: Media, options: ImageOptions, layout: Layout, tile: Size) -> PreparedPicture:
    overview = options.normalize(resize(media.data, layout.overview, options.resize_overview))
    if not layout.refined.width:
        return PreparedPicture(overview=overview)
    refined = resize(media.data, layout.refined, options.resize_refined)
    images = tuple(map(options.normalize, _cut(refined, layout.tiles(tile))))
    return PreparedPicture(images, overview, layout.grid.width, layout.grid.height)


def square_resolutions(image_size: int, most: int) -> tuple[Size, ...]:
    """Return the sizes of 2 to `most` × `most` tiles (set_llava_uhd_res_candidates); Llama 4 has 3."""
    sides = range(1, most + 1)
    return tuple(Size(x * image_size, y * image_size) for x in sides for y in sides if x * y > 1)


def tile_resolutions(image_size: int, fewest: int, most: int) -> tuple[Size, ...]:
    """Return the sizes of `fewest` to `most` tiles (set_internvl_dhr_res_candidates); InternVL has 1 to 12."""
    if fewest < 1:
        return ()
    return tuple(
        Size(x * image_size, y * image_size)
        for x in range(fewest, most + 1)
        for y in range(max(-(-fewest // x), fewest), most // x + 1)
    )


def llava_uhd(media: Media, options: ImageOptions) -> PreparedPicture:
    """Cut pictures larger than `image_size` into tiles, besides an overview; others become an overview alone.

    With `resolutions`, the best of them is cut into tiles of `image_size`; else into up to 9 of about that area. Reads
    `resize_overview` and `resize_refined`.
    """
    size, side = size_of(media.data), options.image_size
    tile = Size(side, side)
    if max(size) <= side:
        return _prepare(media, options, Layout(tile), tile)
    if options.resolutions:
        refined = best_resolution(size, options.resolutions)
        grid = Size(refined.width // side, refined.height // side)
        return _prepare(media, options, Layout(tile, refined, grid), tile)
    ratio = F32(size.width) * F32(size.height) / F32(side * side)
    grid = _best_grid(min(math.ceil(ratio), MAX_SLICES), size)
    cell = Size(*(_divisible(old, n) // n for old, n in zip(size, grid, strict=True)))
    tile = _best_size(cell, side, options.align, enlarge=True)
    refined = Size(tile.width * grid.width, tile.height * grid.height)
    overview = _best_size(size, side, options.align, enlarge=False)
    return _prepare(media, options, Layout(overview, refined, grid), tile)


def internvl(media: Media, options: ImageOptions) -> PreparedPicture:
    """Prepare as `llava_uhd`; the overview comes behind the tiles. Options need `tile_resolutions`."""
    return llava_uhd(media, options)


def minicpmv(media: Media, options: ImageOptions) -> PreparedPicture:
    """Prepare as `llava_uhd`, but with `n_merge` 2, keep the aspect ratio of pictures that are not cut."""
    size, side = size_of(media.data), options.image_size
    if options.n_merge == 2 and F32(size.width) * F32(size.height) / F32(side * side) <= 1:
        tile = _best_size(size, side, options.align, enlarge=True)
        return _prepare(media, options, Layout(tile), tile)
    return llava_uhd(media, options)


def granite(media: Media, options: ImageOptions) -> PreparedPicture:
    """Cut the best of `resolutions` into tiles of `image_size`, besides an overview, whatever the picture's size.

    llama.cpp returns overview and tiles in one image, one above the other. Reads `resize_overview`, `resize_refined`.
    """
    side = options.image_size
    refined = best_resolution(size_of(media.data), options.resolutions)
    grid = Size(refined.width // side, refined.height // side)
    layout = Layout(Size(side, side), refined, grid)
    return _prepare(media, options, layout, Size(side, side))


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """Return the resolution that keeps most pixels of a picture, and of those the one with the smallest margin."""

    def rank(candidate: Size) -> tuple[int, int]:
        scale = min(F32(candidate.width) / F32(size.width), F32(candidate.height) / F32(size.height))
        width, height = (int(F32(side) * scale) for side in size)
        kept = min(width * height, size.width * size.height)
        return -kept, candidate.width * candidate.height - kept

    return min(resolutions, key=rank)


def _divisible(length: int, by: int) -> int:
    """Return the multiple of `by` next to a length, at least `by`."""
    return max(round_half_up(F32(length) / F32(by)) * by, by)


def _best_size(size: Size, side: int, align: int, *, enlarge: bool) -> Size:
    """Return the size of about `side` × `side` pixels in multiples of `align` that keeps the aspect ratio."""
    width, height = size
    if enlarge or width * height > side * side:
        ratio = F32(width) / F32(height)
        height = int(F32(side) / np.sqrt(ratio))
        width = int(F32(height) * ratio)
    return Size(_divisible(width, align), _divisible(height, align))


def _best_grid(n_slices: int, size: Size) -> Size:
    """Return the grid of about `n_slices` tiles whose aspect ratio is nearest to the picture's."""
    ratio = F32(math.log(F32(size.width) / F32(size.height)))
    found, least = Size(1, 1), F32(np.inf)
    for n in (n_slices - 1, n_slices, n_slices + 1):
        if n == 1 or n > MAX_SLICES:
            continue
        for columns in (m for m in range(1, n + 1) if n % m == 0):
            error = F32(abs(float(ratio) - math.log(columns / (n // columns))))
            if error < least:
                found, least = Size(columns, n // columns), error
    return found


def idefics3(media: Media, options: ImageOptions) -> PreparedPicture:
    """Resize to a longer side of `longest_edge`, then to multiples of `image_size`; cut tiles of that size.

    Reads the filter of `resize`. With limits of pixels, or without `longest_edge`, the size is that of `keep_ratio`,
    and `resize_overview` and `resize_refined` are read.
    """
    side = options.image_size
    tile = Size(side, side)
    if options.longest_edge <= 0 or options.min_pixels > 0 or options.max_pixels > 0:
        size = keep_ratio(size_of(media.data), side, options.min_pixels, options.max_pixels, options.longest_edge)
        return _prepare(media, options, Layout(tile, size, Size(size.width // side, size.height // side)), tile)
    between = _longest_side(size_of(media.data), options.longest_edge)
    grid = Size(*(-(-length // side) for length in between))
    size = Size(grid.width * side, grid.height * side)
    how = options.resize._replace(pad=PadStyle.NONE)
    refined = resize(resize(media.data, between, how), size, how)
    images = tuple(map(options.normalize, _cut(refined, Layout(tile, size).tiles(tile))))
    return PreparedPicture(images, options.normalize(resize(refined, tile, how)), grid.width, grid.height)


def _longest_side(size: Size, longest: int) -> Size:
    """Return the size with the longer side given, and an even shorter one."""
    ratio = size.width / size.height
    if size.width >= size.height:
        height = int(longest / ratio)
        return Size(longest, height + height % 2)
    width = int(longest * ratio)
    return Size(width + width % 2, longest)


LFM2_TILE = 512
LFM2_TILES = 2, 10
LFM2_TOLERANCE = 2.0
"""Pictures of more than `max_pixels` times this are cut."""


def lfm2(media: Media, options: ImageOptions) -> PreparedPicture:
    """Cut pictures of more than twice `max_pixels` into 2 to 10 tiles of 512 pixels, besides an overview.

    Others become one image. Overview and image have `min_pixels` to `max_pixels`. Reads `resize_overview` and
    `resize_refined`.
    """
    size, align = size_of(media.data), options.align
    overview = keep_ratio(size, align, options.min_pixels, options.max_pixels)
    tile = Size(LFM2_TILE, LFM2_TILE)
    width, height = (max(options.patch_size, round(length / align) * align) for length in size)
    if width * height <= options.max_pixels * LFM2_TOLERANCE:
        found = _prepare(media, options, Layout(overview), tile)
        assert found.overview is not None
        return PreparedPicture((found.overview,))
    grid = nearest_ratio(size, tile_ratios(*LFM2_TILES), LFM2_TILE)
    refined = Size(grid.width * LFM2_TILE, grid.height * LFM2_TILE)
    return _prepare(media, options, Layout(overview, refined, grid), tile)


def deepseekocr(media: Media, options: ImageOptions) -> PreparedPicture:
    """Fit the picture into an overview of `image_size`; cut larger ones than `tile_size` into tiles of that size.

    There are `min_tiles` to `max_tiles`. For the first DeepSeek-OCR, llama.cpp returns each row of tiles in one image,
    one above the other. Reads the color of `resize`.
    """
    size, tile = size_of(media.data), options.tile_size
    fit = Resize(ResizeFilter.BICUBIC, PadStyle.NEAREST, options.resize.color)
    overview = options.normalize(resize(media.data, Size(options.image_size, options.image_size), fit))
    if max(size) <= tile:
        return PreparedPicture(overview=overview)
    grid = nearest_ratio(size, tile_ratios(options.min_tiles, options.max_tiles), tile)
    layout = Layout(Size(0, 0), Size(grid.width * tile, grid.height * tile), grid)
    refined = resize(media.data, layout.refined, STRETCHED)
    images = tuple(map(options.normalize, _cut(refined, layout.tiles(Size(tile, tile)))))
    return PreparedPicture(images, overview, grid.width, grid.height)


def nearest_ratio(size: Size, grids: Iterable[Size], tile: int) -> Size:
    """Return the grid whose aspect ratio is nearest to a picture's.

    Of several, the last one that the picture fills by half, or the first.
    """
    ratio, area = F32(size.width) / F32(size.height), F32(size.width * size.height)
    found, least = Size(1, 1), F32(np.finfo(F32).max)
    for grid in grids:
        difference = abs(ratio - F32(grid.width) / F32(grid.height))
        is_filled = area > F32(0.5) * F32(tile * tile * grid.width * grid.height)
        if difference < least or (difference == least and is_filled):
            found, least = grid, difference
    return found


def tile_ratios(fewest: int, most: int) -> list[Size]:
    """Return the grids of `fewest` to `most` tiles, in order of their number, as std::sort leaves them."""
    grids: dict[Size, None] = {}
    for n in range(fewest, most + 1):
        for width in range(1, n + 1):
            for height in range(max(1, -(-fewest // width)), min(n, most // width) + 1):
                grids[Size(width, height)] = None
    return _sorted_by_area([*grids])


def _sorted_by_area(grids: list[Size]) -> list[Size]:
    """Sort in place by area, with equal ones in the order of libstdc++'s std::sort, and return the list.

    `nearest_ratio` depends on this order where two grids are equally near. std::sort divides the list as quicksort
    down to parts of 16, by the median of three, and then inserts each item at its place, which is stable.
    """

    def area(i: int) -> int:
        return grids[i].width * grids[i].height

    def swap(i: int, j: int) -> None:
        grids[i], grids[j] = grids[j], grids[i]

    def median(a: int, b: int, c: int) -> int:
        if area(a) < area(b):
            return b if area(b) < area(c) else c if area(a) < area(c) else a
        return a if area(a) < area(c) else c if area(b) < area(c) else b

    def divide(first: int, last: int) -> int:
        swap(first, median(first + 1, (first + last) // 2, last - 1))
        pivot, low, high = area(first), first + 1, last
        while True:
            while area(low) < pivot:
                low += 1
            high -= 1
            while pivot < area(high):
                high -= 1
            if low >= high:
                return low
            swap(low, high)
            low += 1

    def sort(first: int, last: int) -> None:
        while last - first > 16:
            middle = divide(first, last)
            sort(middle, last)
            last = middle

    sort(0, len(grids))
    grids.sort(key=lambda grid: grid.width * grid.height)
    return grids


STEP3_LONGEST_EDGE = 3024
STEP3_CROP = 504


def step3vl(media: Media, options: ImageOptions) -> PreparedPicture:
    """Cut square windows of 504 pixels, or of the shorter side of small long pictures; each becomes 504 × 504.

    The overview is the picture stretched to `image_size`. Pictures are scaled down to `longest_edge` first.
    """
    picture = _step3_picture(media.data, options.longest_edge or STEP3_LONGEST_EDGE)
    size = size_of(picture)
    overview = _interpolate(picture, options.image_size, options)
    window = _step3_window(max(size), min(size), options.image_size)
    if window <= 0:
        return PreparedPicture(overview=overview)
    refined = Size(*(_step3_extent(side, window) for side in size))
    xs, ys = (_step3_starts(length, window) for length in refined)
    picture = resize(picture, refined, Resize(ResizeFilter.BILINEAR, PadStyle.NONE))
    crops = (_crop(picture, x, y, window) for y in ys for x in xs)
    images = tuple(_interpolate(crop, STEP3_CROP, options) for crop in crops)
    return PreparedPicture(images, overview, len(xs), len(ys))


def _step3_picture(picture: NDArray[np.uint8], longest: int) -> NDArray[np.uint8]:
    """Return a picture with margins if it is very narrow, scaled down to its longest side."""
    size = size_of(picture)
    ratio = F32(size.width) / F32(size.height)
    if min(size) < 32 and (ratio > 4 or ratio < F32(0.25)):
        picture = _crop(picture, 0, 0, max(size))
        size = size_of(picture)
    if max(size) <= longest:
        return picture
    scale = F32(longest) / F32(max(size))
    smaller = Size(*(max(1, math.floor(F32(side) * scale)) for side in size))
    return resize(picture, smaller, Resize(ResizeFilter.BILINEAR, PadStyle.NONE))


def _step3_window(longer: int, shorter: int, image_size: int) -> int:
    """Return the side of the windows; 0: none."""
    ratio = F32(longer) / F32(shorter)
    if longer <= image_size:
        return shorter if ratio > 1.5 else 0
    return min(shorter, STEP3_CROP) if ratio > 4 else STEP3_CROP


def _step3_extent(length: int, window: int) -> int:
    """Return a length as multiple of the window, rounded up from 0.2 on; or as it is if it is shorter."""
    ratio = F32(length) / F32(window)
    if ratio < 1:
        return length
    floor = math.floor(ratio)
    return window * (floor + bool(ratio - F32(floor) > F32(0.2)))


def _step3_starts(length: int, window: int) -> list[int]:
    return [0] if length <= window else [*range(0, length, window)]


def _crop(picture: NDArray[np.uint8], x: int, y: int, side: int) -> NDArray[np.uint8]:
    """Return a square of a picture; what is beyond its edges is black."""
    square = np.zeros((side, side, 3), np.uint8)
    part = picture[y : y + side, x : x + side]
    square[: part.shape[0], : part.shape[1]] = part
    return square


def _interpolate(picture: NDArray[np.uint8], side: int, options: ImageOptions) -> NDArray[np.float32]:
    """Return a picture stretched to a square, normalized before it is interpolated between four pixels each."""
    width, height = size_of(picture)
    if width == height == side:
        return options.normalize(picture)
    (x0, x1, dx), (y0, y1, dy) = (_neighbors(length, side) for length in (width, height))
    dx, dy = np.repeat(dx, 3), dy[:, None]

    def along_x(rows: NDArray[np.int32]) -> NDArray[np.float32]:
        near, far = (
            options.normalize(np.take(picture[rows], columns, axis=1)).reshape(side, -1) for columns in (x0, x1)
        )
        return _between(near, far, dx)

    return _between(along_x(y0), along_x(y1), dy).reshape(side, side, 3)


def _between(near: NDArray[np.float32], far: NDArray[np.float32], distance: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return near + (far - near) · distance, in the memory of `far`."""
    far -= near
    far *= distance
    far += near
    return far


def _neighbors(n_in: int, n_out: int) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]:
    """Return both neighbors of each point, and its distance from the first."""
    at = (np.arange(n_out, dtype=F32) + F32(0.5)) * (F32(n_in) / F32(n_out)) - F32(0.5)
    floor = np.floor(at)
    first = floor.astype(np.int32)
    return np.clip(first, 0, n_in - 1), np.clip(first + 1, 0, n_in - 1), at - floor
