"""The bytes of KV cells: copied within the pool, read, written, and judged."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import Device, DeviceLost
from llamado.engine.forward.contract import CellKind, Cells, ForwardError, Scales
from llamado.engine.forward.device_recovery import DeviceRecovery
from llamado.engine.forward.device_tensors import DeviceTensors
from llamado.engine.forward.fingerprint import fingerprint
from llamado.engine.forward.pipeline import Pipeline
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model
from llamado.models.cache import KVCache

_KINDS_KEPT = 64
_HUGE_BF16 = 0x7149  # 1e30: the product of a number of a cache with one of a query stays a float32 up to there


class KVCells:
    """The first `n_cells` cells of a cache, of all layers, wherever they lie; its methods are those of Forward."""

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        kv: KVCache,
        n_cells: int,
        tensors: DeviceTensors,
        pipeline: Pipeline,
        recovery: DeviceRecovery,
    ) -> None:
        self._file, self._model, self._kv = file, model, kv
        self._n_cells = n_cells
        self._tensors, self._pipeline, self._recovery = tensors, pipeline, recovery
        self._type_k, self._type_v = kv.k[0].type, kv.v[0].type
        self._rows = tuple((k.nb[1], v.nb[1]) for k, v in zip(kv.k, kv.v, strict=True))
        self.nbytes = sum(k + v for k, v in self._rows)
        """Of one cell in all layers."""
        self._kinds: dict[Scales, CellKind] = {}

    def copy(self, src: int, dst: int, n: int) -> None:
        """See Forward.copy_cells."""
        if min(src, dst, n) < 0 or max(src, dst) + n > self._n_cells:
            raise ForwardError(f"copy of {n} KV cells from {src} to {dst} of {self._n_cells}")
        self._finish_batches()
        for device, cache in self._tensors.caches():
            device.copy(_rows(cache, src, n), _rows(cache, dst, n))

    def kind(self, scales: Scales = ()) -> CellKind:
        """See Forward.cell_kind."""
        kind = self._kinds.get(scales)
        if kind is None:
            model = fingerprint(self._file, self._model, scales)
            kind = CellKind(model, self._type_k, self._type_v, self._rows, scales)
            if len(self._kinds) < _KINDS_KEPT:
                self._kinds[scales] = kind
        return kind

    def read(self, start: int, n: int) -> Cells:
        """See Forward.read_cells."""
        for batch in self._finish_batches():
            batch.result()
        # All are asked for before the first is waited for: on a link that takes one round trip.
        reads = [(device.read(cache, at, size), size) for device, cache, at, size in self._places(start, n)]
        cells = np.empty(n * self.nbytes, np.uint8)
        at = 0
        for future, size in reads:
            cells[at : at + size] = future.result()
            at += size
        return cells

    def write(self, start: int, n: int, cells: Cells) -> None:
        """See Forward.write_cells."""
        held = cells.size // self.nbytes
        if held * self.nbytes != cells.size or n > held:
            raise ForwardError(f"{cells.size} bytes for {n} KV cells of {self.nbytes}")
        self._finish_batches()
        at = 0
        for device, cache, offset, size in self._places(start, n):
            device.write(cache, cells[at : at + size], offset)
            at += held * cache.nb[1]

    def sound(self, cells: Cells, n: int) -> bool:
        """See Forward.sound_cells."""
        if cells.size != n * self.nbytes:
            return False
        at = 0
        for rows in self._rows:
            for type, row in zip((self._type_k, self._type_v), rows, strict=True):
                if not _sound(cells[at : at + n * row], type):
                    return False
                at += n * row
        return True

    def _finish_batches(self) -> list[Future[NDArray[np.float32]]]:
        """Waits for the batches on their way, which still mean the cells as they are; those that were."""
        batches = self._pipeline.finish()
        lost: DeviceLost | None = self._recovery.lost()
        if lost is not None:  # batches were given up, and what is left of them may still be computed
            raise lost
        return batches

    def _places(self, start: int, n: int) -> Iterable[tuple[Device, Tensor, int, int]]:
        """Where `n` cells lie, in the order of Cells: device, cache, offset, bytes."""
        if min(start, n) < 0 or start + n > self._n_cells:
            raise ForwardError(f"{n} KV cells from {start} of {self._n_cells}")
        for pair in zip(self._kv.k, self._kv.v, strict=True):
            for one in pair:
                device, cache = self._tensors.cache(one.name)
                yield device, cache, start * cache.nb[1], n * cache.nb[1]


def _rows(cache: Tensor, start: int, n: int) -> Tensor:
    """The rows of `n` cells of a cache."""
    row = cache.nb[1]
    return Tensor(
        cache.type, (cache.ne[0], n, 1, 1), (cache.nb[0], row, n * row, n * row), view_src=cache, view_offs=start * row
    )


def _sound(data: Cells, type: TensorType) -> bool:
    """Whether all numbers of a cache's type are finite, and far from where products of them are not."""
    match type:
        case TensorType.F16:
            return not bool(np.any((data.view(np.uint16) & 0x7C00) == 0x7C00))
        case TensorType.Q8_0:  # blocks of a scale in f16 and 32 bytes
            scales = data.reshape(-1, 34)[:, :2].copy().view(np.uint16)
            return not bool(np.any((scales & 0x7C00) == 0x7C00))
        case TensorType.BF16:
            return not bool(np.any((data.view(np.uint16) & 0x7FFF) >= _HUGE_BF16))
        case _:
            return not bool(np.any((data.view(np.uint32) & 0x7FFF_FFFF) >= _HUGE_BF16 << 16))
