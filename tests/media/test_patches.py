"""Patches of images, in order row by row, in groups, and in windows."""

from __future__ import annotations

import numpy as np
import pytest

from llamado.media.patches import merged_order, merged_patches, patches


def test_patches_are_products_of_a_convolution() -> None:
    rng = np.random.default_rng(0)
    image = rng.random((6, 9, 3), np.float32)
    weight = rng.random((5, 3, 3, 3), np.float32)  # [n, color, y, x], as in files
    found = patches(image, 3) @ weight.reshape(5, -1).T
    expected = [
        [np.sum(image[y : y + 3, x : x + 3].transpose(2, 0, 1) * one) for one in weight]
        for y in (0, 3)
        for x in (0, 3, 6)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_patches_are_contiguous() -> None:
    found = patches(np.zeros((4, 6, 3), np.float32), 2)
    assert found.shape == (6, 12) and found.dtype == np.float32 and found.flags.c_contiguous


def test_pixels_that_fill_no_patch_are_left_out() -> None:
    image = np.random.default_rng(0).random((7, 8, 3), np.float32)
    np.testing.assert_array_equal(patches(image, 3), patches(image[:6, :6], 3))


@pytest.mark.parametrize("n_merge", [1, 2, 3])
def test_groups(n_merge: int) -> None:
    image = np.random.default_rng(0).random((12, 24, 3), np.float32)
    order = merged_order(12, 6, n_merge)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(merged_patches(image, 2, n_merge), patches(image, 2)[order])


def test_order_of_groups() -> None:
    assert merged_order(4, 4, 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
