"""Grids of patches on the host, and the input of encoders that take any size.

Patches are ordered such that those that a projector merges are neighbors. Their rows and columns in the picture are
inputs of the graph, for rotary and learned positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.media.chunks import EncoderInput
from llamado.media.errors import MediaError
from llamado.media.patches import merged_order, patches
from llamado.models.encoders.encoder import EncoderPass, MediaEncoder
from llamado.models.encoders.parts.patches import PATCHES

ROWS, COLUMNS = "rows", "columns"
"""Names of inputs: row and column of each patch."""


class PatchGrid(NamedTuple):
    """`ny` rows of `nx` patches each."""

    nx: int
    ny: int

    @property
    def n(self) -> int:
        """Number of patches."""
        return self.nx * self.ny

    def order(self, side: int = 1) -> NDArray[np.int32]:
        """Return the number of each patch (row by row), with squares of `side` × `side` patches one after the other."""
        return merged_order(self.nx, self.ny, side)


def place_inputs(step: EncoderPass, n: int) -> tuple[Tensor, Tensor]:
    """Return the inputs ROWS and COLUMNS: I32 [n]."""
    return step.input(ROWS, n, type=TensorType.I32), step.input(COLUMNS, n, type=TensorType.I32)


class GridEncoder(MediaEncoder):
    """Encoder of pictures of any size that is a multiple of `merge` patches of `patch` pixels.

    The shape of an input is the grid: columns and rows of patches.
    """

    patch: int
    merge: int = 1

    @property
    def unit(self) -> int:
        """Pixels of the squares that a picture is made of."""
        return self.patch * self.merge

    def input(self, pixels: NDArray[np.float32]) -> EncoderInput:
        """Return the input for a prepared picture, float32 [height, width, 3]. Raises MediaError."""
        height, width, _ = pixels.shape
        unit = self.unit
        if height % unit or width % unit or not height or not width:
            raise MediaError(f"a picture of {width} × {height} pixels is not made of squares of {unit} pixels")
        grid = PatchGrid(width // self.patch, height // self.patch)
        order = self.order(grid)
        arrays = {PATCHES: np.ascontiguousarray(self.cut(pixels)[order])}
        return EncoderInput(grid, arrays | dict(self.arrays(grid, order)))

    def cut(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the patches of a picture, row by row, as rows in the order of the weights."""
        return patches(self.scaled(pixels), self.patch)

    def scaled(self, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the pixels in the range that the weights expect."""
        return pixels

    def order(self, grid: PatchGrid) -> NDArray[np.int32]:
        """Return the numbers of the patches, row by row, in the order of the input: int32 [n]."""
        return grid.order(self.merge)

    def arrays(self, grid: PatchGrid, order: NDArray[np.int32]) -> Mapping[str, NDArray[Any]]:
        """Return the other arrays of an input, for patches in this order: by default the rows and columns."""
        return {ROWS: order // grid.nx, COLUMNS: order % grid.nx}

    @abstractmethod
    def n_tokens(self, grid: PatchGrid) -> int:
        """Return the number of embeddings of a picture."""
