"""Patches of images, in the orders that encoders need.

A patch is a row of 3·p·p values: color by color, each row by row, as in the weights of a convolution ([p, p, 3, n] in
GGUF), so that the convolution is a matrix product.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def patches(image: NDArray[np.float32], patch_size: int) -> NDArray[np.float32]:
    """Return the patches of an image, float32 [h, w, 3], row by row: float32 [n_patches, 3·p·p].

    Pixels that fill no patch, on the right and below, are left out.
    """
    return merged_patches(image, patch_size, 1)


def merged_patches(image: NDArray[np.float32], patch_size: int, n_merge: int) -> NDArray[np.float32]:
    """Return the patches in groups of `n_merge` × `n_merge` neighbors: float32 [n_patches, 3·p·p].

    The groups, and the patches in a group, are in order row by row, so that the patches that become one token follow
    each other. Pixels that fill no group, on the right and below, are left out.
    """
    height, width, channels = image.shape
    p, m = patch_size, n_merge
    rows, columns = height // (p * m), width // (p * m)
    split = image[: rows * p * m, : columns * p * m].reshape(rows, m, p, columns, m, p, channels)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * p * p)


def merged_order(columns: int, rows: int, n_merge: int) -> NDArray[np.int32]:
    """Return, for each patch in the order of `merged_patches`, its index in the order of `patches`."""
    m = n_merge
    plain = np.arange(rows * columns, dtype=np.int32).reshape(rows // m, m, columns // m, m)
    return plain.transpose(0, 2, 1, 3).reshape(-1)
