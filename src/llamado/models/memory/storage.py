"""Storage of a memory's rows: copy, read and write, on whichever device the tensors are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from llamado.ggml.tensor import Tensor

Bytes = NDArray[np.uint8]


class RowSpan(NamedTuple):
    """Rows `start` to `start + n` of one of a memory's tensors."""

    tensor: Tensor
    start: int
    n: int


class Storage(Protocol):
    """Row storage of a memory's tensors; operations run in order with batches. Raises DeviceLost."""

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        """Copy `n` rows of each tensor from row `src` to row `dst`; they may overlap (memmove)."""
        ...

    def read_rows(self, spans: Sequence[RowSpan]) -> Bytes:
        """Return the concatenated bytes of these rows."""
        ...

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Bytes]) -> None:
        """Write each piece to the rows of its span."""
        ...


class NoStorage:
    """Storage of a memory whose tensors are not allocated yet."""

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        raise RuntimeError("the memory's tensors are not allocated yet")

    def read_rows(self, spans: Sequence[RowSpan]) -> Bytes:
        raise RuntimeError("the memory's tensors are not allocated yet")

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Bytes]) -> None:
        raise RuntimeError("the memory's tensors are not allocated yet")
