"""Preprocessing of pictures beside that of the real mtmd: equal bits for random pictures and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtmd_images as real
import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.media import model_sizes, preprocessing, tiling
from llamado.media.media import Media, MediaKind
from llamado.media.preprocessing import ImageOptions, PreparedPicture, Preprocess
from llamado.media.resize import PadStyle, Resize, ResizeFilter, Size

pytestmark = pytest.mark.interop

FILTERS = {real.BILINEAR: ResizeFilter.BILINEAR, real.BICUBIC: ResizeFilter.BICUBIC, real.LANCZOS: ResizeFilter.LANCZOS}
PADS = {real.NONE: PadStyle.NONE, real.CEIL: PadStyle.CEIL, real.NEAREST: PadStyle.NEAREST}
Given = dict[str, Any]


def options(given: Given) -> ImageOptions:
    """Return the options for hparams of the real one."""

    def how(suffix: str, pad: int) -> Resize:
        pad_name = f"image_pad{suffix}" if suffix else "image_resize_pad"
        filter = FILTERS[given.get(f"image_resize_algo{suffix}", real.BICUBIC)]
        return Resize(filter, PADS[given.get(pad_name, pad)], given.get(f"image_pad_color{suffix}", (0, 0, 0)))

    names = {
        "n_merge": "n_merge", "min_pixels": "image_min_pixels", "max_pixels": "image_max_pixels",
        "longest_edge": "image_longest_edge", "min_tiles": "preproc_min_tiles", "max_tiles": "preproc_max_tiles",
        "tile_size": "preproc_tile_size", "max_tokens": "dsv4_max_n_token", "max_aspect_ratio": "dsv4_max_wh_ratio",
    }  # fmt: skip
    return ImageOptions(
        image_size=given.get("image_size", 0),
        patch_size=given.get("patch_size", 1),
        mean=real.MEAN,
        std=real.STD,
        resize=how("", real.CEIL),
        resize_overview=how("_ov", real.NONE),
        resize_refined=how("_rf", real.CEIL),
        resolutions=tuple(Size(*size) for size in given.get("pinpoints", ())),
        **{name: given[key] for name, key in names.items() if key in given},
    )


def noise(rng: np.random.Generator, most: int, ratio: float = 4.5) -> NDArray[np.uint8]:
    """Return noise of a random size, whose sides differ by up to a factor of `ratio`."""
    area, r = np.exp(rng.uniform(2, 2 * np.log(most))), np.exp(rng.uniform(-1, 1) * np.log(ratio))
    height, width = (max(1, round(float(side))) for side in (np.sqrt(area / r), np.sqrt(area * r)))
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def sizes(rng: np.random.Generator) -> Given:
    """Return sizes of patches and pictures, and limits of pixels."""
    patch_size, n_merge = int(rng.integers(4, 17)), int(rng.integers(1, 4))
    fewest = int(rng.integers(1, 30)) * (patch_size * n_merge) ** 2
    return {
        "image_size": int(rng.integers(30, 150)),
        "patch_size": patch_size,
        "n_merge": n_merge,
        "image_min_pixels": fewest,
        "image_max_pixels": fewest * int(rng.integers(2, 10)),
    }


def ways(rng: np.random.Generator, *suffixes: str) -> Given:
    """Return filters, ways to pad, and colors."""
    found: Given = {}
    for suffix in suffixes or ("",):
        found[f"image_resize_algo{suffix}"] = int(rng.integers(3))
        found[f"image_pad{suffix}" if suffix else "image_resize_pad"] = int(rng.integers(3))
        found[f"image_pad_color{suffix}"] = tuple(map(int, rng.integers(0, 256, 3)))
    return found


def tiled(rng: np.random.Generator) -> Given:
    return sizes(rng) | ways(rng, "", "_ov", "_rf")


def with_resolutions(resolutions: Callable[[int], tuple[Size, ...]]) -> Callable[[np.random.Generator], Given]:
    def make(rng: np.random.Generator) -> Given:
        given = tiled(rng)
        return given | {"pinpoints": resolutions(given["image_size"])}

    return make


def check(found: PreparedPicture, expected: real.RealOutput, about: str, apart: float = 0.0) -> None:
    """Compare all images, whose values may be so far apart, and the grid."""
    if found.overview is None:
        assert expected.overview is None, about
    else:
        assert expected.overview is not None, about
        np.testing.assert_allclose(found.overview, expected.overview.values, 0, apart, err_msg=about)
    assert (found.columns, found.rows) == (expected.grid_x, expected.grid_y), about
    assert len(found.images) == len(expected.entries), about
    for image, entry in zip(found.images, expected.entries, strict=True):
        np.testing.assert_allclose(image, entry.values, 0, apart, err_msg=about)


ROUNDINGS = {"step3vl": 1e-3}
"""Greatest difference of values (a level of a picture is 0.015). llama.cpp resizes in floats there, and clang fuses
products with sums that GCC does not.
"""


def compare(
    programs: Path, strategy: Preprocess, name: str, make: Callable[[np.random.Generator], Given], n: int, most: int
) -> None:
    rng = np.random.default_rng(0)
    for _ in range(n):
        given, pixels = make(rng), noise(rng, most)
        expected = real.preprocess(programs, name, real.hparams(**given), pixels)
        found = strategy(Media(MediaKind.IMAGE, pixels), options(given))
        check(found, expected, f"{given} {pixels.shape}", ROUNDINGS.get(name, 0.0))


LLAMA4 = with_resolutions(lambda side: tiling.square_resolutions(side, 3))
INTERNVL = with_resolutions(lambda side: tiling.tile_resolutions(side, 1, 12))
LFM2: Given = {"patch_size": 16, "n_merge": 2, "image_min_pixels": 64 * 1024, "image_max_pixels": 256 * 1024}
CASES: dict[str, tuple[Preprocess, str, Callable[[np.random.Generator], Given], int, int]] = {
    "fixed_size": (preprocessing.fixed_size, "fixed_size", lambda rng: sizes(rng) | ways(rng), 40, 300),
    "dyn_size": (preprocessing.dyn_size, "dyn_size", lambda rng: sizes(rng) | ways(rng), 40, 300),
    "longest_edge": (
        preprocessing.longest_edge,
        "longest_edge",
        lambda rng: sizes(rng) | ways(rng) | {"image_longest_edge": int(rng.integers(30, 300))},
        40,
        300,
    ),
    "longest_edge-unlimited": (
        preprocessing.longest_edge,
        "longest_edge",
        lambda rng: {"patch_size": 14, "image_longest_edge": int(rng.integers(30, 300))} | ways(rng),
        20,
        300,
    ),
    "glm5v": (model_sizes.glm5v, "glm5v", lambda rng: sizes(rng) | ways(rng), 60, 300),
    "youtuvl": (model_sizes.youtuvl, "youtuvl", lambda rng: sizes(rng) | ways(rng), 40, 400),
    "youtuvl-unlimited": (model_sizes.youtuvl, "youtuvl", lambda rng: {"patch_size": 8, "n_merge": 2}, 20, 400),
    "muse_glimmer": (model_sizes.muse_glimmer, "muse_glimmer", lambda rng: sizes(rng) | ways(rng), 60, 400),
    "deepseek4v": (
        model_sizes.deepseek4v,
        "deepseek4v",
        lambda rng: sizes(rng) | ways(rng) | {"dsv4_max_n_token": int(rng.integers(16, 400)), "dsv4_max_wh_ratio": 3},
        60,
        400,
    ),
    "llava_uhd": (tiling.llava_uhd, "llava_uhd", tiled, 60, 600),
    "llava_uhd-pinpoints": (
        tiling.llava_uhd,
        "llava_uhd",
        with_resolutions(lambda side: (Size(side, 2 * side), Size(2 * side, side), Size(2 * side, 2 * side))),
        30,
        300,
    ),
    "llama4": (tiling.llava_uhd, "llava_uhd", LLAMA4, 30, 500),
    "internvl": (tiling.internvl, "internvl", INTERNVL, 40, 500),
    "minicpmv": (tiling.minicpmv, "minicpmv", tiled, 60, 400),
    "idefics3": (
        tiling.idefics3,
        "idefics3",
        lambda rng: tiled(rng) | {"image_longest_edge": int(rng.integers(100, 500)), "image_min_pixels": -1}
        | {"image_max_pixels": -1},
        40,
        500,
    ),
    "idefics3-limits": (tiling.idefics3, "idefics3", tiled, 30, 400),
    "lfm2": (tiling.lfm2, "lfm2", lambda rng: LFM2 | ways(rng, "_ov", "_rf"), 8, 1500),
    "deepseekocr": (
        tiling.deepseekocr,
        "deepseekocr",
        lambda rng: ways(rng) | {"image_size": 128, "preproc_tile_size": 64, "preproc_min_tiles": 2}
        | {"preproc_max_tiles": int(rng.integers(2, 33))},
        40,
        500,
    ),
    "step3vl": (
        tiling.step3vl,
        "step3vl",
        lambda rng: {"image_size": int(rng.integers(100, 800)), "image_longest_edge": int(rng.integers(0, 2000))},
        6,
        1500,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_llama_cpp(peer_bin: Path, name: str) -> None:
    strategy, peer, make, n, most = CASES[name]
    compare(peer_bin, strategy, peer, make, n, most)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_equals_llama_cpp_for_many_pictures(peer_bin: Path, name: str) -> None:
    strategy, peer, make, n, most = CASES[name]
    compare(peer_bin, strategy, peer, make, 10 * n, most)


@pytest.mark.slow
def test_granite_equals_llama_cpp(peer_bin: Path) -> None:
    make = with_resolutions(lambda side: (Size(side, 2 * side), Size(2 * side, side), Size(side, side)))
    rng = np.random.default_rng(0)
    for _ in range(40):
        given, pixels = make(rng), noise(rng, 400)
        (stacked,) = real.preprocess(peer_bin, "granite", real.hparams(**given), pixels).entries
        found = tiling.granite(Media(MediaKind.IMAGE, pixels), options(given))
        assert found.overview is not None and (found.columns, found.rows) == stacked.tiles
        np.testing.assert_array_equal(np.concatenate([found.overview, *found.images]), stacked.values)


def test_rows_of_tiles_of_the_first_deepseek_ocr_equal_llama_cpp(peer_bin: Path) -> None:
    given: Given = {"image_size": 64, "preproc_tile_size": 40, "preproc_min_tiles": 2, "preproc_max_tiles": 9}
    pixels = np.random.default_rng(0).integers(0, 256, (100, 170, 3), np.uint8)
    expected = real.preprocess(peer_bin, "deepseekocr", real.hparams(**given), pixels, fuse_row=True)
    found = tiling.deepseekocr(Media(MediaKind.IMAGE, pixels), options(given))
    assert (found.columns, found.rows) == (3, 2) and (expected.grid_x, expected.grid_y) == (1, 2)
    for y, row in enumerate(expected.entries):
        np.testing.assert_array_equal(np.concatenate(found.images[3 * y : 3 * y + 3]), row.values)


# Each is as near to another grid of as many tiles.
@pytest.mark.slow
@pytest.mark.parametrize("size", [(1000, 1600), (1600, 1000), (850, 2000), (1300, 1200)])
def test_ratios_between_two_grids_equal_llama_cpp(peer_bin: Path, size: tuple[int, int]) -> None:
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    expected = real.preprocess(peer_bin, "lfm2", real.hparams(**LFM2), pixels)
    check(tiling.lfm2(Media(MediaKind.IMAGE, pixels), options(LFM2)), expected, str(size))


def test_order_of_grids_equals_llama_cpp(peer_bin: Path) -> None:
    for most in range(1, 33):
        for fewest in {0, 1, 2, 3, most}:
            if fewest <= most:
                assert tiling.tile_ratios(fewest, most) == real.target_ratios(peer_bin, fewest, most)
