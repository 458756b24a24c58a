"""Tensor data copied from an open file to a new one, with progress."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from numpy.typing import NDArray

from llamado.gguf.header import TensorInfo
from llamado.gguf.reader import GGUFFile
from llamado.gguf.report import Progress
from llamado.gguf.writer import NewTensor

PIECE = 16 << 20


class CopyProgress:
    """Split tensor data into pieces and report progress over `total` bytes."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._total, self._progress, self._done = total, progress, 0

    def pieces(self, data: NDArray[Any]) -> Iterator[NDArray[Any]]:
        """Yield a tensor's bytes in pieces."""
        for start in range(0, len(data), PIECE):
            piece = data[start : start + PIECE]
            yield piece
            self._done += len(piece)
            if self._progress is not None:
                self._progress(self._done, self._total)


def new_tensors(infos: Iterable[TensorInfo]) -> list[NewTensor]:
    """Return the same tensors for a new file."""
    return [NewTensor(info.name, info.type, info.ne) for info in infos]


def all_data(file: GGUFFile, progress: Progress | None = None) -> Iterator[Iterator[NDArray[Any]]]:
    """Yield the bytes of every tensor of a file, in file order."""
    counted = CopyProgress(file.nbytes, progress)
    return (counted.pieces(file.data(name)) for name in file.tensors)
