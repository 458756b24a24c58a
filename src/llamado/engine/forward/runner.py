"""A model whose layers are on one or many devices: the Forward of the engine.

A batch is checked, the graph for its shape is found or built, and the graph's inputs are filled. Then its parts run on
their devices one after the other, each on the thread of its device, closely followed by the next batch.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.mapped import watch
from llamado.devices.device import Device, DeviceError, DeviceLost, OperationTime
from llamado.engine.forward.contract import CellKind, ForwardError, Scales
from llamado.engine.forward.device_recovery import DeviceRecovery
from llamado.engine.forward.device_rows import DeviceRows
from llamado.engine.forward.device_tensors import DeviceTensors, Progress
from llamado.engine.forward.graphs import Graphs
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.pipeline import JoinedRows, Pipeline
from llamado.ggml.graph import Graph
from llamado.gguf.reader import GGUFFile
from llamado.models.base import Model
from llamado.models.batch import Batch, BatchShape
from llamado.models.memory import BatchPlacement, Span, windows_before

if TYPE_CHECKING:
    from llamado.devices.split.placement import Placement

log = logging.getLogger(__name__)

_AGAIN = 0.5  # seconds between attempts to reach a device that was lost while the model is loaded
_FEW = 64
"""Numbers whose minimum Python finds before numpy starts."""
_CHUNK = 128
"""Prompt tokens in a batch if workers form a pipeline: the second device works on one while the first has the next.
Accelerators of one machine are faster with larger batches.
"""

_REPLACED = (
    "it is mapped from the disk: replace it by renaming another file to its name, or start with --no-mmap, "
    "which reads it into memory first"
)


class Profile(NamedTuple):
    """A graph with unchanged inputs, and the times of its operations."""

    graph: Graph
    operations: list[OperationTime]


class ModelRunner:
    """Runs `model` (read from `file`) on `devices`, with a memory of sequences.

    `placement`: layers by device; None: all on the first device, which must be this machine's.
    """

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        devices: Sequence[Device],
        options: RunnerOptions,
        placement: Placement | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.file, self.model = file, model
        self.devices = list(devices)
        self.n_vocab = model.hparams.n_vocab
        self.width = model.width(options.output)
        self.features_width = model.features_width(options.features)
        self.max_batch = options.max_batch
        memory = self.memory = model.memory(options)
        self._tensors = DeviceTensors(file, model, memory, self.devices, placement, options)
        self._graphs = Graphs(self._tensors, self.devices, model, memory, options)
        self._pipeline = Pipeline(self.devices, options.output.value, self.width)
        self._watches = [
            watch(path, opened.shard_data(i), _REPLACED)
            for opened in (file, *(adapter.file for adapter in model.adapters))
            for i, path in enumerate(opened.shard_paths)
        ]

        self.recovery = DeviceRecovery(
            self.devices, self._tensors, self._pipeline, self._graphs.largest, self._settle, options
        )
        self.times = self._pipeline.times

        self.rows = DeviceRows(file, model, memory, self._tensors, self._pipeline, self.recovery)
        memory.attach(self.rows)
        self._wait = options.wait
        try:
            self._with_all(lambda: self._settle(progress), progress)
        except BaseException:
            self.close()
            raise

    @property
    def placement(self) -> Placement | None:
        """The present placement."""
        return self._tensors.placement

    @property
    def numerics(self) -> str | None:
        """Fingerprint of the devices that layers are on; None if one of them does not report it."""
        placement = self.placement
        if placement is None:
            return self.devices[0].numerics
        elsewhere = [number for _, number in placement.overrides]
        found = []
        for number in (placement.embedding, *placement.layers, *elsewhere):
            numerics = self.devices[number].numerics
            if numerics is None:
                return None
            found.append(numerics)
        return found[0] if len(set(found)) == 1 else ";".join(found) + repr(placement.overrides)

    @property
    def links(self) -> list[tuple[int, int]]:
        """Pairs of devices of which the first passes its results straight to the second."""
        return self._pipeline.ring.pairs

    def cell_kind(self, scales: Scales = ()) -> CellKind:
        """Return the meaning of the bytes of sequences that were computed with these adapter scales."""
        return self.rows.kind(scales)

    def unpadded(self, n: int) -> int:
        """Return the most of `n` tokens that a batch can have without padding."""
        return self._graphs.fit(n)

    def read(self, name: str) -> NDArray[np.float32]:
        """Return an observer's output after the last batch; its memory may have further numbers behind it."""
        device, tensor = self._tensors.given(name)
        return np.frombuffer(self.devices[device].read(tensor, 0, tensor.nbytes).result(), np.float32)

    @property
    def depth(self) -> int:
        """Best number of batches in flight."""
        return self._pipeline.depth.value

    @property
    def launches(self) -> bool:
        """True if `start` returns while a batch is computed. Parts of a batch with states wait for one another."""
        return len(self.devices) == 1 and self.placement is None and not self.memory.has_states

    @property
    def chunk(self) -> int:
        """Best number of prompt tokens in one batch."""
        is_networked = any(self.devices[number].endpoint is not None for number in self._tensors.used)
        return min(_CHUNK, self.max_batch) if is_networked and self._pipeline.depth.least > 1 else self.max_batch

    def start(
        self,
        tokens: NDArray[np.int32],
        spans: Sequence[Span],
        outputs: NDArray[np.int32],
        *,
        scales: Scales = (),
        features: NDArray[np.float32] | None = None,
        given: NDArray[np.float32] | None = None,
        stage: int = 0,
        embeddings: NDArray[np.float32] | None = None,
    ) -> Future[NDArray[np.float32]]:
        """Start a batch (see Forward.start). Raises ForwardError and DeviceLost."""
        lost = self.recovery.lost()
        if lost is not None:
            raise lost
        try:
            n = self.memory.n_before
            before = windows_before(tokens, spans, n) if n else None
            parts = self.memory.place(spans, self._graphs.fit)
        except ValueError as error:
            raise ForwardError(str(error)) from error
        if parts[0].tokens is None:
            ids = tokens if embeddings is None else None
            batch = Batch(
                parts[0].positions, outputs, parts[0].rows, ids, embeddings, hidden_states=given, before=before
            )
            return self.submit(batch, scales, features, stage)
        return self._start_each(parts, tokens, outputs, scales, features, before, embeddings)

    def _start_each(
        self,
        parts: Sequence[BatchPlacement],
        tokens: NDArray[np.int32],
        outputs: NDArray[np.int32],
        scales: Scales,
        features: NDArray[np.float32] | None,
        before: NDArray[np.int32] | None,
        embeddings: NDArray[np.float32] | None,
    ) -> Future[NDArray[np.float32]]:
        """Evaluate a batch in the parts that it was divided into."""
        if len(tokens) > self.max_batch:
            raise ForwardError(f"a batch of {len(tokens)} tokens; the device takes 1 to {self.max_batch}")
        joined = JoinedRows(len(parts), len(outputs), self.width, features)
        for part in parts:
            assert part.tokens is not None
            places = np.flatnonzero(np.isin(outputs, part.tokens))
            wanted = np.searchsorted(part.tokens, outputs[places])
            behind = None if before is None else before[part.tokens]
            ids = tokens[part.tokens] if embeddings is None else None
            rows = None if embeddings is None else embeddings[part.tokens]
            batch = Batch(part.positions, wanted, part.rows, ids, rows, n_seqs=part.n_seqs, before=behind)
            own = None if features is None else np.empty((len(part.tokens), self.features_width), np.float32)
            joined.add(self.submit(batch, scales, own), places, part.tokens, own)
        return joined.future

    def submit(
        self, batch: Batch, scales: Scales = (), features: NDArray[np.float32] | None = None, stage: int = 0
    ) -> Future[NDArray[np.float32]]:
        """Start a batch whose memory rows are placed. Raises ForwardError and DeviceLost."""
        used = self._check(batch)
        lost = self.recovery.lost()
        if lost is not None:
            raise lost
        embeddings = batch.tokens is None
        if embeddings and not any(shape.embeddings for shape in self._graphs.largest):
            self._make_room_for_embeddings()
        n_tokens, n_outputs = batch.n_tokens, len(batch.outputs)
        given = 0 if batch.hidden_states is None else batch.hidden_states.shape[1]
        shape = self._graphs.shape(n_tokens, n_outputs, used, scales, embeddings, batch.n_seqs, given, stage)
        return self._begin(shape, batch, features)

    def _make_room_for_embeddings(self) -> None:
        """Allocate memory for embeddings before the first batch of them, because few models ever get one."""
        self._pipeline.wait_idle()
        self._graphs.largest.append(dataclasses.replace(self._graphs.largest[0], embeddings=True))
        try:
            self._settle()
        except BaseException:
            self._graphs.largest.pop()
            raise

    def _begin(
        self, shape: BatchShape, batch: Batch, features: NDArray[np.float32] | None = None
    ) -> Future[NDArray[np.float32]]:
        """Start a batch with the graph for a shape, which pads the batch."""
        graph = self._graphs.get(shape)
        return self._pipeline.start(graph.parts, graph.feeds, batch, features)

    def _check(self, batch: Batch) -> int:
        """Return how many of the first cells a batch sees; raises ForwardError for an invalid one."""
        n, outputs, tokens, embeddings = batch.n_tokens, batch.outputs, batch.tokens, batch.embeddings
        if not 0 < n <= self.max_batch:
            raise ForwardError(f"a batch of {n} tokens; the device takes 1 to {self.max_batch}")
        if len(batch.memory) != len(self.memory.parts):
            raise ForwardError(f"a batch for {len(batch.memory)} parts of a memory of {len(self.memory.parts)}")
        used = 1
        for rows, part in zip(batch.memory, self.memory.parts, strict=True):
            last = _greatest(rows.last)
            highest = max(_greatest(rows.written), last)
            if highest >= part.n_rows or _least(rows.first) < 0:
                raise ForwardError(f"a token at row {highest} of a memory of {part.n_rows}")
            used = max(used, last + 1)
        if _least(batch.positions) < 0:
            raise ForwardError("a token before the first position")
        if tokens is not None and (len(tokens) != n or not _all_below(tokens, self.n_vocab)):
            raise ForwardError(f"a token outside the vocabulary of {self.n_vocab}")
        width = self.model.n_embd_input
        if tokens is None and (embeddings is None or embeddings.shape != (n, width)):
            raise ForwardError(f"{n} tokens without embeddings of {width} elements")
        if len(outputs) and (len(outputs) > n or not _all_below(outputs, n)):
            raise ForwardError(f"an output that is no row of a batch of {n}")
        return used

    def warm_up(self, batch_sizes: list[int], progress: Progress | None = None, scales: Scales = ()) -> None:
        """Prepare these batch sizes (their kernels come from the disk cache if they are there).

        Further shapes that requests are likely to need are left to `prepare_ahead`.
        """
        self._with_all(lambda: self._graphs.warm_up(batch_sizes, progress, scales), progress)

    def _with_all(self, work: Callable[[], None], progress: Progress | None) -> None:
        """Run loading work, again whenever a device was lost meanwhile and is back in time."""
        until, since = 0.0, ""
        while True:
            try:
                work()
                if (gone := self.recovery.lost()) is None:
                    return
                raise gone
            except DeviceLost as error:
                if not since:
                    until, since = time.monotonic() + self._wait, time.strftime("%H:%M:%S")
                lost = error
                log.warning("%s; waiting for it", error.as_logged())
            back = False
            while not back:
                if time.monotonic() >= until:
                    raise lost
                if progress is not None:
                    progress(f"waiting since {since}: {lost}", 0, 0)
                try:
                    self.recovery.restore(False)
                    back = True
                except DeviceLost as error:
                    lost = error
                    time.sleep(_AGAIN)

    def prepare_ahead(self) -> bool:
        """Prepare one more shape that requests are likely to need."""
        shape = self._graphs.next_ahead()
        if shape is None:
            return False
        if self.placement is None:
            self._graphs.prepare(shape)
            return True
        # a batch of padding only, so that remote devices have its programs
        nothing = np.empty(0, np.int64)
        with suppress(DeviceLost):
            self._begin(shape, Batch(nothing, nothing, self.memory.empty().rows, nothing)).result()
        return True

    def profile(self, n: int, start: int = 0, repeats: int = 20) -> Profile:
        """Measure the times of each operation for `n` tokens of one sequence from position `start` on, the last with
        logits: medians over `repeats` passes.

        Raises ForwardError unless the whole model is on this machine.
        """
        device = self.devices[0]
        n_seqs = int(self.memory.has_states)
        n = self._graphs.fit(n) if n_seqs else n
        if self.placement is not None or not device.local:
            raise ForwardError("operations can be timed only where the whole model is on this machine")
        handle = self.memory.allocate(start + n)
        if handle is None:
            raise ForwardError(f"{start + n} tokens in a memory of {self.memory.n_cells} of which some are used")
        tail = np.zeros(self.memory.tail_bytes(start), np.uint8)
        self.memory.write_tail(handle, start, tail)
        handle.used = start  # with any contents
        spans = [Span(handle, start, n, before=[0] * start)]
        self.start(np.zeros(n, np.int32), spans, np.array([n - 1], np.int32)).result()
        self.memory.free(handle)
        graph = self._graphs.build(self._graphs.shape(n, 1, start + n, n_seqs=n_seqs)).parts[0].graph
        return Profile(graph, device.profile(graph, repeats))

    def _settle(self, progress: Progress | None = None) -> None:
        """Give devices what they lack in the present placement."""
        self._graphs.clear()
        parts = self._tensors.settle(self._graphs.largest, progress)
        self._pipeline.set_up(parts, self._tensors.used)

    def close(self) -> None:
        """Stop the threads and release the memory."""
        self._pipeline.close()
        self.recovery.close()
        for device in self.devices:
            with suppress(DeviceError):  # of a card that does not respond
                device.close()
        for end in self._watches:
            end()


def _all_below(numbers: NDArray[np.integer], limit: int) -> bool:
    """Return True if all are from 0 to below `limit`."""
    return _least(numbers) >= 0 and _greatest(numbers) < limit


def _least(numbers: NDArray[np.integer]) -> int:
    return min(numbers.ravel().tolist()) if numbers.size <= _FEW else int(numbers.min())


def _greatest(numbers: NDArray[np.integer]) -> int:
    return max(numbers.ravel().tolist()) if numbers.size <= _FEW else int(numbers.max())
