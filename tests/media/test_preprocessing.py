"""Preprocessing of pictures to one image: sizes, padding, filters, normalization, and pictures that cannot be used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.media.errors import MediaError
from llamado.media.media import Media, MediaKind
from llamado.media.preprocessing import ImageOptions, dyn_size, fixed_size, keep_ratio, longest_edge
from llamado.media.resize import PadStyle, Resize, ResizeFilter, Size, normalize, resize, round_half_up


def plain(**values: Any) -> ImageOptions:
    """Return options that leave colors from 0 to 1."""
    given: dict[str, Any] = {"image_size": 0, "mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    return ImageOptions(**(given | values))


def gradient(width: int, height: int) -> NDArray[np.uint8]:
    """Return a picture whose red grows to the right and whose green grows downwards."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), 0 * x + 9], axis=2).astype(np.uint8)


def media(width: int, height: int) -> Media:
    return Media(MediaKind.IMAGE, gradient(width, height))


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((100, 50), {}, (112, 56)),
        ((10, 10), {}, (28, 28)),
        ((42, 42), {}, (56, 56)),  # 1.5 rounds away from zero
        ((1000, 500), {"max_pixels": 100_000}, (420, 196)),
        ((30, 90), {"min_pixels": 10_000}, (84, 196)),
        ((1000, 10), {"min_pixels": 8 * 784, "max_pixels": 4096 * 784}, (1008, 28)),
        ((2000, 20), {"max_pixels": 20_000}, (1400, 28)),
        ((640, 480), {"longest_edge": 300}, (308, 252)),
        ((640, 480), {"longest_edge": 300, "min_pixels": 200_000}, (532, 392)),
    ],
)
def test_sizes_keep_the_ratio(size: tuple[int, int], limits: dict[str, int], expected: tuple[int, int]) -> None:
    assert keep_ratio(Size(*size), 28, **limits) == expected


@pytest.mark.parametrize(("x", "rounded"), [(0.5, 1), (1.5, 2), (2.5, 3), (2.4999, 2), (0.49999999999999994, 0)])
def test_halves_are_rounded_up(x: float, rounded: int) -> None:
    assert round_half_up(x) == rounded


def test_bilinear_columns_before_rows() -> None:
    # One pass of Pillow 13 would take the rows first here, with other roundings.
    noise = np.random.default_rng(0).integers(0, 256, (30, 16, 3), np.uint8)
    found = resize(noise, Size(4, 4), Resize(ResizeFilter.BILINEAR, PadStyle.NONE))
    columns = resize(noise, Size(4, 30), Resize(ResizeFilter.BILINEAR, PadStyle.NONE))
    assert np.array_equal(found, resize(columns, Size(4, 4), Resize(ResizeFilter.BILINEAR, PadStyle.NONE)))
    assert found[0].tolist() == [[120, 134, 143], [129, 117, 129], [131, 114, 98], [123, 124, 130]]


@pytest.mark.parametrize(
    ("filter", "row"),
    [
        (ResizeFilter.BILINEAR, [24, 73, 128, 182, 231]),
        (ResizeFilter.BICUBIC, [20, 72, 127, 183, 235]),
        (ResizeFilter.LANCZOS, [19, 72, 128, 183, 236]),
    ],
)
def test_filters(filter: ResizeFilter, row: list[int]) -> None:
    found = resize(gradient(16, 2), Size(5, 2), Resize(filter, PadStyle.NONE))
    assert found[0, :, 0].tolist() == row


@pytest.mark.parametrize(
    ("pad", "size", "target", "left", "width"),
    [
        (PadStyle.CEIL, (7, 10), (20, 20), 3, 14),
        (PadStyle.NEAREST, (7, 10), (20, 20), 3, 14),
        (PadStyle.CEIL, (7, 30), (20, 20), 7, 5),  # 4.67 wide
        (PadStyle.CEIL, (8, 30), (20, 20), 7, 6),  # 5.33 wide
        (PadStyle.NEAREST, (8, 30), (20, 20), 8, 5),
        (PadStyle.NONE, (8, 30), (20, 20), 0, 20),
    ],
)
def test_padding(pad: PadStyle, size: tuple[int, int], target: tuple[int, int], left: int, width: int) -> None:
    white = np.full((size[1], size[0], 3), 255, np.uint8)
    found = resize(white, Size(*target), Resize(pad=pad, color=(10, 20, 30)))
    expected = np.zeros((target[1], target[0], 3), np.uint8) + np.array([10, 20, 30], np.uint8)
    expected[:, left : left + width] = 255
    assert np.array_equal(found, expected)


def test_a_picture_of_the_right_size_is_not_resized() -> None:
    picture = gradient(8, 8)
    assert resize(picture, Size(8, 8), Resize()) is picture


def test_colors_are_normalized() -> None:
    picture = np.array([[[0, 51, 255]]], np.uint8)
    found = normalize(picture, (0.5, 0.1, 0.0), (0.5, 0.2, 2.0))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, [[[-1, 0.5, 0.5]]], rtol=1e-6)


def test_fixed_size() -> None:
    found = fixed_size(media(20, 10), plain(image_size=14, patch_size=7))
    assert found.image.shape == (14, 14, 3) and found.overview is None and not found.columns
    assert not found.image[:3].any() and found.image[3:10, 1:].any() and not found.image[10:].any()


def test_dyn_size() -> None:
    options = plain(patch_size=7, n_merge=2, min_pixels=200, max_pixels=4000)
    assert dyn_size(media(200, 100), options).image.shape == (42, 84, 3)
    assert dyn_size(media(5, 4), options).image.shape == (14, 28, 3)


def test_longest_edge() -> None:
    options = plain(patch_size=7, n_merge=2, longest_edge=100)
    assert longest_edge(media(200, 100), options).image.shape == (56, 112, 3)


def test_limits_of_tokens() -> None:
    options = plain(patch_size=7, n_merge=2)
    limited = options.limit_tokens(8, 1024)
    assert (limited.min_pixels, limited.max_pixels) == (8 * 196, 1024 * 196)
    limited = options.limit_tokens(8, 1024, user_min=2, user_max=20)
    assert (limited.min_pixels, limited.max_pixels) == (2 * 196, 20 * 196)
    assert options.limit_tokens() == options


@pytest.mark.parametrize(("width", "height"), [(500, 1), (1, 500)])
def test_a_picture_too_long_for_the_size_is_an_error(width: int, height: int) -> None:
    options = plain(image_size=14, patch_size=7, resize=Resize(pad=PadStyle.NEAREST))
    with pytest.raises(MediaError, match=r"would have to be resized to .*\b0\b.*: crop it"):
        fixed_size(media(width, height), options)


def test_a_picture_stretched_beyond_the_longest_side_is_an_error() -> None:
    options = plain(patch_size=14, max_pixels=14 * 14 * 9000, min_pixels=14 * 14 * 8000)
    with pytest.raises(MediaError, match="would have to be resized to"):
        dyn_size(media(3000, 1), options)
