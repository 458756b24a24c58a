"""How a memory's rows are copied, read and written, wherever its tensors lie."""

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
    """Moves the bytes of rows, wherever the tensors lie; all of it in order with the batches. Raises DeviceLost."""

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        """Copies `n` rows of each tensor from row `src` to row `dst`; they may overlap (memmove)."""
        ...

    def read_rows(self, spans: Sequence[RowSpan]) -> Bytes:
        """The bytes of these rows, one span behind the other."""
        ...

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Bytes]) -> None:
        """Puts the bytes of each piece into the rows of its span."""
        ...


class NoStorage:
    """Of a memory whose tensors lie nowhere yet."""

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        raise RuntimeError("the memory's tensors have no place yet")

    def read_rows(self, spans: Sequence[RowSpan]) -> Bytes:
        raise RuntimeError("the memory's tensors have no place yet")

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Bytes]) -> None:
        raise RuntimeError("the memory's tensors have no place yet")
