"""Preprocessing of pictures beside that of the real mtmd: equal bits for random pictures and options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mtmd_images as real
import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.media.media import Media, MediaKind
from llamado.media.preprocessing import ImageOptions, Preprocess, dyn_size, fixed_size, longest_edge
from llamado.media.resize import PadStyle, Resize, ResizeFilter

pytestmark = pytest.mark.interop

FILTERS = {real.BILINEAR: ResizeFilter.BILINEAR, real.BICUBIC: ResizeFilter.BICUBIC, real.LANCZOS: ResizeFilter.LANCZOS}
PADS = {real.NONE: PadStyle.NONE, real.CEIL: PadStyle.CEIL, real.NEAREST: PadStyle.NEAREST}


def options(given: dict[str, Any]) -> ImageOptions:
    """Return the options for hparams of the real one."""
    color = given.get("image_pad_color", (0, 0, 0))
    how = Resize(FILTERS[given.get("image_resize_algo", real.BICUBIC)], PADS[given["image_resize_pad"]], color)
    return ImageOptions(
        image_size=given["image_size"],
        patch_size=given["patch_size"],
        n_merge=given["n_merge"],
        min_pixels=given["image_min_pixels"],
        max_pixels=given["image_max_pixels"],
        longest_edge=given["image_longest_edge"],
        resize=how,
        mean=real.MEAN,
        std=real.STD,
    )


def picture(rng: np.random.Generator, most: int = 600) -> NDArray[np.uint8]:
    """Return noise of a random size, whose sides differ by up to a factor of 20."""
    area, ratio = np.exp(rng.uniform(2, 2 * np.log(most / 4))), np.exp(rng.uniform(-1.5, 1.5))
    height, width = (max(1, round(float(side))) for side in (np.sqrt(area / ratio), np.sqrt(area * ratio)))
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    patch_size, n_merge = int(rng.integers(4, 17)), int(rng.integers(1, 4))
    fewest = int(rng.integers(1, 30)) * (patch_size * n_merge) ** 2
    return {
        "image_size": int(rng.integers(8, 150)),
        "patch_size": patch_size,
        "n_merge": n_merge,
        "image_min_pixels": fewest,
        "image_max_pixels": fewest * int(rng.integers(2, 10)),
        "image_longest_edge": int(rng.integers(30, 300)),
        "image_resize_algo": int(rng.integers(3)),
        "image_resize_pad": int(rng.integers(3)),
        "image_pad_color": tuple(map(int, rng.integers(0, 256, 3))),
    }


@pytest.mark.parametrize("strategy", [fixed_size, dyn_size, longest_edge], ids=lambda one: one.__name__)
def test_one_image_equals_llama_cpp(peer_bin: Path, strategy: Preprocess | Callable[..., Any]) -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        given, pixels = random_options(rng), picture(rng)
        expected = real.preprocess(peer_bin, strategy.__name__, real.hparams(**given), pixels)
        found = strategy(Media(MediaKind.IMAGE, pixels), options(given))
        np.testing.assert_array_equal(found.image, expected.entries[0].values, f"{given} {pixels.shape}")
