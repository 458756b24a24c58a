"""Copying, reading and writing rows of a model's memory on its devices, in order with batches; and the fingerprint of
models whose rows are interchangeable.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import DeviceLost
from llamado.engine.forward.contract import ActivatedScales, CellKind, Cells, ForwardError, Scales
from llamado.engine.forward.device_recovery import DeviceRecovery
from llamado.engine.forward.device_tensors import DeviceTensors
from llamado.engine.forward.pipeline import Pipeline
from llamado.ggml.role import ModelPart
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.models.base import Model
from llamado.models.memory import Memory, RowSpan

_KINDS_KEPT = 64
# bytes of each end of a tensor: two fine-tunings of a model differ nearly everywhere, and reading all of it would take
# as long as loading
_SAMPLE = 2048


class DeviceRows:
    """The Storage of a memory on devices: copies, reads and writes rows of its tensors, in order with batches."""

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        memory: Memory,
        tensors: DeviceTensors,
        pipeline: Pipeline,
        recovery: DeviceRecovery,
    ) -> None:
        self._file, self._model, self._memory = file, model, memory
        self._tensors, self._pipeline, self._recovery = tensors, pipeline, recovery
        self._kinds: dict[Scales, CellKind] = {}
        self._n_rows = memory.rows_of

    def kind(self, scales: Scales = ()) -> CellKind:
        """Return the meaning of the bytes of sequences that were computed with these adapter scales. Any thread."""
        kind = self._kinds.get(scales)
        if kind is None:
            kind = CellKind(fingerprint(self._file, self._model, self._memory, scales), self._memory, scales)
            if len(self._kinds) < _KINDS_KEPT:
                self._kinds[scales] = kind
        return kind

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        """Copy `n` rows of each tensor; they may overlap. Raises DeviceLost and ForwardError."""
        for tensor in tensors:
            self._check(RowSpan(tensor, src, n))
            self._check(RowSpan(tensor, dst, n))
        self._finish_batches()
        for tensor in tensors:
            device, cache = self._tensors.cache(tensor.name)
            device.copy(_rows(cache, src, n), _rows(cache, dst, n))

    def read_rows(self, spans: Sequence[RowSpan]) -> Cells:
        """Return the bytes of rows. Raises DeviceLost, ForwardError, and the error of a failed batch in flight."""
        for batch in self._finish_batches():
            batch.result()
        # start all reads before waiting for the first: one round trip on a link
        reads = []
        for span in spans:
            self._check(span)
            device, cache = self._tensors.cache(span.tensor.name)
            row = cache.nb[1]
            reads.append((device.read(cache, span.start * row, span.n * row), span.n * row))
        data = np.empty(sum(size for _, size in reads), np.uint8)
        at = 0
        for future, size in reads:
            data[at : at + size] = future.result()
            at += size
        return data

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Cells]) -> None:
        """Write each piece to the rows of its span. Raises DeviceLost and ForwardError."""
        self._finish_batches()
        for span, data in zip(spans, pieces, strict=True):
            self._check(span)
            device, cache = self._tensors.cache(span.tensor.name)
            if data.size != span.n * cache.nb[1]:
                raise ForwardError(f"{data.size} bytes for {span.n} rows of {cache.nb[1]}")
            device.write(cache, data, span.start * cache.nb[1])

    def _finish_batches(self) -> list[Future[NDArray[np.float32]]]:
        """Wait for the batches in flight, which use the present rows; return them."""
        batches = self._pipeline.finish()
        lost: DeviceLost | None = self._recovery.lost()
        if lost is not None:  # batches were abandoned, and parts of them may still be running
            raise lost
        return batches

    def _check(self, span: RowSpan) -> None:
        n_rows = self._n_rows[span.tensor.name]
        if min(span.start, span.n) < 0 or span.start + span.n > n_rows:
            raise ForwardError(f"{span.n} rows from {span.start} of {n_rows} of {span.tensor.name}")


def _rows(cache: Tensor, start: int, n: int) -> Tensor:
    """View some rows of a tensor."""
    row = cache.nb[1]
    return Tensor(
        cache.type, (cache.ne[0], n, 1, 1), (cache.nb[0], row, n * row, n * row), view_src=cache, view_offs=start * row
    )


def fingerprint(file: GGUFFile, model: Model, memory: Memory, scales: Sequence[float] = ()) -> bytes:
    """SHA-256 of the architecture, the hyper-parameters, and name, shape and ends of each weight that cells depend on.

    These are all weights except the output's. The hash also includes the effect of the context length on positions (see
    LongRopeFactors), the rotation of a quantized cache, the control vector, and the adapters with a scale other than 0.
    """
    digest = hashlib.sha256(f"{model.architecture}\n{model.hparams!r}\n".encode())
    if any(name.startswith("rope_factors_") for name in model.weights):
        digest.update(b"long" if memory.n_ctx > model.hparams.n_ctx_short else b"short")
    if memory.unrotated:
        digest.update(b"unturned")
    shaping = [name for name, roles in model.roles.items() if any(role.part is not ModelPart.OUTPUT for role in roles)]
    for name in sorted(shaping):
        info = file.tensors[name]
        data = file.data(name)
        digest.update(f"{name} {info.type.name} {info.ne}\n".encode())
        digest.update(data[:_SAMPLE].tobytes())
        digest.update(data[-_SAMPLE:].tobytes())
    if model.control is not None:
        digest.update(b"control " + model.control.stamp)
    for adapter, scale in zip(model.adapters, scales, strict=False):
        adapted = sorted(adapter.pairs.keys() & shaping)
        if not scale or not adapted:
            continue
        digest.update(b"adapter " + struct.pack("<fd", scale, adapter.alpha))
        if isinstance(scales, ActivatedScales):
            digest.update(b"from " + struct.pack("<q", scales.start))
        for weight in adapted:
            for tensor in adapter.pairs[weight]:
                data = adapter.data(tensor.name)
                digest.update(f"{weight} {tensor.type.name} {tensor.ne}\n".encode())
                digest.update(data[:_SAMPLE].tobytes())
                digest.update(data[-_SAMPLE:].tobytes())
    return digest.digest()
