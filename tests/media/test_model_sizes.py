"""Sizes and contents of pictures by the rules of particular models. The expected sizes are those of llama.cpp."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.media.model_sizes import deepseek4v, deepseek4v_tokens, glm5v, muse_glimmer, youtuvl
from llamado.media.preprocessing import ImageOptions, Preprocess
from llamado.media.resize import PadStyle, Resize, Size


def options(**values: Any) -> ImageOptions:
    """Return options that leave colors from 0 to 1, with tokens of 10 × 10 pixels."""
    given: dict[str, Any] = {"image_size": 0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return ImageOptions(**(given | {"patch_size": 5, "n_merge": 2} | values))


def white(width: int, height: int) -> Media:
    return Media(MediaKind.IMAGE, np.full((height, width, 3), 255, np.uint8))


LIMITS = {"min_pixels": 1000, "max_pixels": 5000}
CASES: dict[str, tuple[Preprocess, dict[str, Any], tuple[int, int], tuple[int, int]]] = {
    "glm5v": (glm5v, LIMITS, (41, 60), (50, 60)),
    "glm5v-small": (glm5v, LIMITS, (12, 30), (20, 50)),
    "glm5v-large": (glm5v, LIMITS, (300, 170), (90, 50)),
    "youtuvl": (youtuvl, LIMITS, (41, 60), (50, 60)),
    "youtuvl-large": (youtuvl, LIMITS, (300, 170), (90, 50)),
    "youtuvl-narrow": (youtuvl, LIMITS, (392, 33), (240, 20)),
    "youtuvl-unlimited": (youtuvl, {}, (300, 170), (100, 60)),
    "youtuvl-too-long": (youtuvl, LIMITS, (3000, 1), (490, 10)),
    "muse_glimmer": (muse_glimmer, LIMITS, (41, 60), (40, 60)),
    "muse_glimmer-large": (muse_glimmer, LIMITS, (300, 170), (90, 50)),
    "muse_glimmer-tie": (muse_glimmer, LIMITS, (16, 12), (20, 20)),
    "muse_glimmer-tiny": (muse_glimmer, LIMITS, (3, 2), (10, 10)),
    "muse_glimmer-too-long": (muse_glimmer, LIMITS, (3000, 1), (3000, 10)),
    "deepseek4v": (deepseek4v, {"max_tokens": 40}, (41, 60), (40, 55)),
    "deepseek4v-small": (deepseek4v, {"max_tokens": 40, "min_pixels": 1000}, (12, 30), (20, 50)),
    "deepseek4v-large": (deepseek4v, {"max_tokens": 40}, (300, 170), (70, 35)),
    "deepseek4v-narrow": (deepseek4v, {"max_tokens": 40}, (392, 33), (150, 20)),
    "deepseek4v-wide": (deepseek4v, {"max_tokens": 40, "max_aspect_ratio": 3}, (300, 17), (55, 20)),
    "deepseek4v-tall": (deepseek4v, {"max_tokens": 40, "max_aspect_ratio": 3}, (11, 700), (10, 160)),
}


@pytest.mark.parametrize("name", CASES)
def test_size(name: str) -> None:
    strategy, given, size, expected = CASES[name]
    assert strategy(white(*size), options(**given)).image.shape[1::-1] == expected


def test_glm5v_puts_the_picture_on_the_upper_left() -> None:
    image = glm5v(white(41, 33), options(**LIMITS)).image
    assert image.shape == (40, 50, 3) and image[:33, :41].min() == 1
    assert not image[33:].any() and not image[:, 41:].any()


def test_glm5v_enlarges_small_pictures() -> None:
    image = glm5v(white(12, 30), options(**LIMITS)).image
    assert image[:, :20].min() == 1 and not image[:, 20:].any()


def test_youtuvl_pads_with_black() -> None:
    image = youtuvl(white(41, 60), options(resize=Resize(color=(255, 255, 255)))).image
    assert not image[:, :4].any() and image[:, 5:45].min() == 1


def test_deepseek4v_pads_unless_the_picture_is_very_wide() -> None:
    gray = Resize(pad=PadStyle.CEIL, color=(51, 51, 51))
    image = deepseek4v(white(41, 60), options(max_tokens=40, resize=gray)).image
    np.testing.assert_allclose(image[:, 0], 0.2, rtol=1e-6)
    assert image[:, 20].min() == 1
    assert deepseek4v(white(300, 17), options(max_tokens=40, max_aspect_ratio=3, resize=gray)).image.min() == 1


def test_tokens_of_a_block() -> None:
    # Rows of 4 tokens and a newline; 3 rows become 4.
    assert deepseek4v_tokens(Size(40, 20), options()) == 2 + 2 * 5 + 2
    assert deepseek4v_tokens(Size(40, 30), options()) == 2 + 4 * 5
    assert deepseek4v_tokens(Size(35, 25), options()) == 2 + 4 * 5


def test_no_room_for_a_picture_is_an_error() -> None:
    with pytest.raises(MediaError, match="41 × 60 pixels cannot be fitted into 6 tokens"):
        deepseek4v(white(41, 60), options(max_tokens=6))
