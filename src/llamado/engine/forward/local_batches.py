"""Batches on a single device of this process, whose memory is filled and read in place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import Buffer, Bytes, Device
from llamado.devices.split.partition import GraphPart
from llamado.engine.forward.times import Times
from llamado.ggml.tensor import Tensor
from llamado.models.batch import FEATURES, Batch
from llamado.models.inputs import Input


class _GraphMemory(NamedTuple):
    """Memory of a graph's inputs, in the order of its feeds, and of its results."""

    inputs: list[tuple[Input, Bytes]]
    rows: Bytes | None
    features: Bytes | None


class _LaunchedRows(Future[NDArray[np.float32]]):
    """Rows of a launched batch: a caller of `result` waits for it, and its thread joins in the computation."""

    def __init__(self, device: Device, rows: NDArray[np.float32]) -> None:
        super().__init__()
        self._device = device
        self.set_result(rows)

    def result(self, timeout: float | None = None) -> NDArray[np.float32]:
        self._device.finish()
        return super().result(timeout)


class LocalBatches:
    """Runs batches one after the other; inputs that changed little are only updated (see Input.renew).

    `output`, `width`: see Pipeline. `times`: records times, if there are other devices, too.
    """

    def __init__(self, output: str, width: int, times: Times | None) -> None:
        self._output, self._width, self._times = output, width, times
        self._places: WeakKeyDictionary[GraphPart, _GraphMemory] = WeakKeyDictionary()
        self._held: dict[str, object] = {}

    def forget(self) -> None:
        """Drop cached memory, because tensors moved or were written."""
        self._places.clear()
        self._held.clear()

    def run(
        self,
        device: Device,
        part: GraphPart,
        feeds: Sequence[Input],
        batch: Batch,
        features: NDArray[np.float32] | None = None,
    ) -> Future[NDArray[np.float32]]:
        """Start a batch; see Pipeline.start. The rows are the device's own memory, which the next batch overwrites.

        The batch is only launched on return, so that the caller can do other work meanwhile.
        """
        began = time.monotonic()
        device.finish()
        places = self._places.get(part) or self._find(part, feeds)
        held, n_bytes = self._held, 0
        for feed, memory in places.inputs:
            known = held.pop(feed.name, None)
            held[feed.name] = feed.renew(batch, memory, known)
            n_bytes += memory.nbytes
        device.launch(part.graph)
        n_rows = len(batch.outputs)
        if places.rows is None:
            rows = np.empty((n_rows, self._width), np.float32)
        else:
            rows = places.rows[: 4 * self._width * n_rows].view(np.float32).reshape(n_rows, self._width)
        if features is not None and places.features is not None:
            device.finish()
            features[:] = places.features[: features.nbytes].view(np.float32).reshape(features.shape)
        if self._times is not None:
            device.finish()
            self._times.part(part.device, began, began, n_bytes + rows.nbytes)
            self._times.batch(began, n_rows)
        return _LaunchedRows(device, rows)

    def _find(self, part: GraphPart, feeds: Sequence[Input]) -> _GraphMemory:
        graph = part.graph
        rows, features = graph.outputs.get(self._output), graph.outputs.get(FEATURES)
        places = self._places[part] = _GraphMemory(
            [(feed, _memory(graph.inputs[feed.name])) for feed in feeds],
            None if rows is None else _memory(rows),
            None if features is None else _memory(features),
        )
        return places


def _memory(tensor: Tensor) -> Bytes:
    """The bytes of a bound tensor of a device in this process."""
    memory = cast(Buffer, tensor.buffer).memory
    assert memory is not None
    return memory[tensor.offset : tensor.offset + tensor.nbytes]
