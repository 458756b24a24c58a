"""Tiles of pictures: grids, sizes and contents, by strategy. The expected sizes are those of llama.cpp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamado.media.media import Media, MediaKind
from llamado.media.preprocessing import ImageOptions, PreparedPicture, Preprocess
from llamado.media.resize import STRETCHED, Resize, ResizeFilter, Size, resize
from llamado.media.tiling import (
    best_resolution,
    deepseekocr,
    granite,
    idefics3,
    internvl,
    lfm2,
    llava_uhd,
    minicpmv,
    nearest_ratio,
    square_resolutions,
    step3vl,
    tile_ratios,
    tile_resolutions,
)


def options(**values: Any) -> ImageOptions:
    """Return options that leave colors from 0 to 1, with tiles of 40 pixels."""
    given: dict[str, Any] = {"image_size": 40, "patch_size": 5, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return ImageOptions(**(given | values))


def media(width: int, height: int) -> Media:
    y, x = np.mgrid[:height, :width]
    colors = [x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), 0 * x + 9]
    return Media(MediaKind.IMAGE, np.stack(colors, axis=2).astype(np.uint8))


def described(found: PreparedPicture) -> tuple[Any, ...]:
    """Return the grid, the overview's width and height, and those of the tiles, if they are equal."""
    sizes = {image.shape[1::-1] for image in found.images}
    assert len(sizes) <= 1 and len(found.images) == found.columns * found.rows
    overview = None if found.overview is None else found.overview.shape[1::-1]
    return found.columns, found.rows, overview, *sizes


DEEPSEEK = {"tile_size": 32, "min_tiles": 2, "max_tiles": 9}
PINPOINTS = (Size(40, 80), Size(80, 40), Size(80, 80))
FOURS_AND_SIXES = [(2, 2), (4, 1), (1, 4), (3, 2), (2, 3), (1, 6), (6, 1)]
CASES: dict[str, tuple[Preprocess, dict[str, Any], tuple[int, int], tuple[Any, ...]]] = {
    "llava_uhd-small": (llava_uhd, {}, (40, 30), (0, 0, (40, 40))),
    "llava_uhd-wide": (llava_uhd, {}, (120, 50), (3, 1, (60, 25), (35, 45))),
    "llava_uhd-tall": (llava_uhd, {}, (50, 300), (1, 8, (15, 95), (45, 35))),
    "llava_uhd-square": (llava_uhd, {}, (200, 200), (3, 3, (40, 40), (40, 40))),
    "llava_uhd-narrow": (llava_uhd, {}, (117, 7), (2, 1, (115, 5), (110, 15))),
    "llava_uhd-rounded": (llava_uhd, {}, (131, 61), (3, 2, (55, 25), (45, 35))),
    "llava_uhd-tie": (llava_uhd, {}, (54, 54), (1, 2, (40, 40), (55, 30))),
    "llava_uhd-most": (llava_uhd, {}, (250, 100), (4, 2, (60, 25), (45, 35))),
    "llava_uhd-pinpoints": (llava_uhd, {"resolutions": PINPOINTS}, (100, 45), (2, 1, (40, 40), (40, 40))),
    "llama4": (llava_uhd, {"resolutions": square_resolutions(40, 3)}, (130, 70), (3, 2, (40, 40), (40, 40))),
    "llava_uhd-waste": (llava_uhd, {"resolutions": (Size(80, 80), *PINPOINTS)}, (18, 73), (1, 2, (40, 40), (40, 40))),
    "internvl": (internvl, {"resolutions": tile_resolutions(40, 1, 12)}, (200, 100), (4, 2, (40, 40), (40, 40))),
    "minicpmv-small": (minicpmv, {"n_merge": 2}, (40, 20), (0, 0, (60, 30))),
    "minicpmv": (minicpmv, {"n_merge": 2}, (120, 50), (3, 1, (60, 30), (40, 40))),
    "minicpmv-unmerged": (minicpmv, {}, (40, 20), (0, 0, (40, 40))),
    "granite": (granite, {"resolutions": PINPOINTS}, (30, 70), (1, 2, (40, 40), (40, 40))),
    "granite-small": (granite, {"resolutions": PINPOINTS}, (20, 10), (1, 2, (40, 40), (40, 40))),
    "idefics3": (idefics3, {"longest_edge": 120}, (99, 44), (3, 2, (40, 40), (40, 40))),
    "idefics3-tall": (idefics3, {"longest_edge": 120}, (44, 99), (2, 3, (40, 40), (40, 40))),
    "idefics3-limits": (idefics3, {"longest_edge": 120, "max_pixels": 5000}, (99, 44), (2, 1, (40, 40), (40, 40))),
    "deepseekocr-small": (deepseekocr, DEEPSEEK, (32, 20), (0, 0, (40, 40))),
    "deepseekocr": (
        deepseekocr,
        {"tile_size": 32, "min_tiles": 2, "max_tiles": 9},
        (100, 40),
        (3, 1, (40, 40), (32, 32)),
    ),
    "step3vl-small": (step3vl, {"image_size": 728}, (60, 50), (0, 0, (728, 728))),
    "step3vl-long": (step3vl, {"image_size": 728}, (100, 50), (2, 1, (728, 728), (504, 504))),
    "step3vl-narrow": (step3vl, {"image_size": 728}, (100, 10), (0, 0, (728, 728))),
    "step3vl-large": (step3vl, {"image_size": 728}, (1100, 600), (2, 1, (728, 728), (504, 504))),
    "step3vl-limit-narrow": (
        step3vl,
        {"image_size": 100, "longest_edge": 150},
        (392, 33),
        (13, 1, (100, 100), (504, 504)),
    ),
    "step3vl-limit": (step3vl, {"image_size": 728, "longest_edge": 800}, (1000, 500), (2, 1, (728, 728), (504, 504))),
}


@pytest.mark.parametrize("name", CASES)
def test_layout(name: str) -> None:
    strategy, given, size, expected = CASES[name]
    assert described(strategy(media(*size), options(**given))) == expected


def test_tiles_are_parts_of_the_resized_picture_row_by_row() -> None:
    given = options(resolutions=(Size(120, 80),), resize_refined=STRETCHED)
    picture = media(100, 70)
    found = llava_uhd(picture, given)
    refined = given.normalize(resize(picture.data, Size(120, 80), STRETCHED))
    rows = [np.concatenate(found.images[3 * y : 3 * y + 3], axis=1) for y in range(2)]
    np.testing.assert_array_equal(np.concatenate(rows), refined)
    np.testing.assert_array_equal(found.overview, given.normalize(resize(picture.data, Size(40, 40), STRETCHED)))


def test_overview_and_tiles_are_resized_in_their_own_way() -> None:
    bilinear, padded = Resize(ResizeFilter.BILINEAR), Resize(color=(255, 0, 0))
    given = options(resolutions=(Size(80, 80),), resize_overview=bilinear, resize_refined=padded)
    picture = media(90, 45)
    found = llava_uhd(picture, given)
    np.testing.assert_array_equal(found.overview, given.normalize(resize(picture.data, Size(40, 40), bilinear)))
    assert found.images[0][0, 0].tolist() == [1, 0, 0]


def test_idefics3_resizes_three_times() -> None:
    given = options(longest_edge=120, resize=Resize(ResizeFilter.LANCZOS))
    how = Resize(ResizeFilter.LANCZOS, STRETCHED.pad)
    picture = media(99, 44)
    refined = resize(resize(picture.data, Size(120, 54), how), Size(120, 80), how)
    found = idefics3(picture, given)
    np.testing.assert_array_equal(found.images[4], given.normalize(refined[40:, 40:80]))
    np.testing.assert_array_equal(found.overview, given.normalize(resize(refined, Size(40, 40), how)))


def test_lfm2_cuts_large_pictures() -> None:
    given = options(patch_size=16, n_merge=2, min_pixels=4 * 1024, max_pixels=16 * 1024, resize_refined=STRETCHED)
    whole = lfm2(media(192, 160), given)  # 30 tokens, at most twice 16
    assert described(PreparedPicture(overview=whole.image))[2] == (128, 96) and whole.overview is None
    cut = lfm2(media(192, 192), given)
    assert described(cut) == (2, 2, (128, 128), (512, 512))


def test_deepseek_ocr_pads_the_overview() -> None:
    given = options(tile_size=32, min_tiles=2, max_tiles=9, resize=Resize(color=(51, 102, 204)))
    found = deepseekocr(media(100, 50), given)
    assert found.overview is not None
    np.testing.assert_allclose(found.overview[9, 3], [0.2, 0.4, 0.8], rtol=1e-6)
    assert found.overview[10, 0, 2] == np.float32(9 / 255)
    found = deepseekocr(media(100, 51), given)  # 20.4 pixels high, rounded down
    assert found.overview is not None and found.overview[29, 0, 2] == found.overview[10, 0, 2] == np.float32(9 / 255)
    assert found.overview[9, 0, 2] == found.overview[30, 0, 2] == np.float32(0.8)


def test_step3_interpolates_between_normalized_pixels() -> None:
    given = options(image_size=4, mean=(0.5, 0.5, 0.5), std=(0.5, 0.25, 0.125))
    data = np.array([[[0, 51, 102], [255, 204, 153]], [[51, 51, 51], [0, 0, 0]]], np.uint8)
    found = step3vl(Media(MediaKind.IMAGE, data), given).overview
    assert found is not None and found.dtype == np.float32
    np.testing.assert_allclose(found[0, :, 0], [-1, -0.5, 0.5, 1], rtol=1e-6)
    np.testing.assert_allclose(found[1, :, 2], [-1.2, -1, -0.6, -0.4], rtol=1e-5, atol=1e-6)


def test_step3_pads_narrow_pictures_with_black() -> None:
    given = options(image_size=100)
    found = step3vl(Media(MediaKind.IMAGE, np.full((10, 100, 3), 255, np.uint8)), given).overview
    assert found is not None and found[:10].min() == 1 and not found[10:].any()


def test_step3_windows_beyond_the_edge_are_black() -> None:
    given = options(image_size=728)
    found = step3vl(Media(MediaKind.IMAGE, np.full((100, 900, 3), 255, np.uint8)), given)
    assert (found.columns, found.rows) == (9, 1) and found.images[0].min() == 1
    found = step3vl(Media(MediaKind.IMAGE, np.full((300, 900, 3), 255, np.uint8)), given)
    assert (found.columns, found.rows) == (2, 1)
    assert found.images[0][:300].min() == 1 and not found.images[0][300:].any()


def test_resolutions() -> None:
    assert square_resolutions(10, 2) == ((10, 20), (20, 10), (20, 20))
    assert tile_resolutions(10, 1, 3) == ((10, 10), (10, 20), (10, 30), (20, 10), (30, 10))
    assert tile_resolutions(10, 0, 3) == ()


def test_best_resolution() -> None:
    sizes = Size(100, 100), Size(200, 100), Size(100, 200), Size(200, 200)
    assert best_resolution(Size(111, 200), sizes) == (200, 200)
    assert best_resolution(Size(50, 100), sizes) == (100, 100)
    assert best_resolution(Size(90, 180), sizes) == (100, 200)


def test_the_nearest_ratio() -> None:
    grids = tile_ratios(2, 10)
    assert nearest_ratio(Size(50, 100), grids, 64) == (1, 2)  # (2, 4) would be less than half full
    assert nearest_ratio(Size(200, 400), grids, 64) == (2, 4)
    assert nearest_ratio(Size(3000, 100), grids, 64) == (10, 1)


def test_grids_in_the_order_of_std_sort() -> None:
    # Up to 16 grids, the order is stable; beyond, it is that of libstdc++.
    assert tile_ratios(2, 4) == [(1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (1, 4), (4, 1)]
    assert [grid for grid in tile_ratios(2, 10) if grid.width * grid.height in (4, 6)] == FOURS_AND_SIXES
    assert sorted(tile_ratios(2, 10)) == sorted(Size(x, y) for x in range(11) for y in range(11) if 2 <= x * y <= 10)
