"""A model whose layers lie on one device or many: the Forward that the engine drives.

A batch is checked; the graph for its shape is found or built; the graph's inputs are filled; and its parts go through
their devices one after the other, each on the thread of its device, with the next batch on its heels.
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
from llamado.devices.device import Device, DeviceLost, OperationTime
from llamado.engine.forward.contract import ForwardError, Scales
from llamado.engine.forward.device_recovery import DeviceRecovery, Reconnect, Replace
from llamado.engine.forward.device_rows import DeviceRows
from llamado.engine.forward.device_tensors import DeviceTensors, Progress
from llamado.engine.forward.graphs import Graphs
from llamado.engine.forward.pipeline import JoinedRows, Pipeline
from llamado.engine.observed import ProductObserver
from llamado.ggml.graph import Graph
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model
from llamado.models.batch import Batch, BatchShape, Output
from llamado.models.memory import Placed, Span, windows_before

if TYPE_CHECKING:
    from llamado.devices.split.placement import Placement

log = logging.getLogger(__name__)

_AGAIN = 0.5  # seconds between two attempts to reach a device that was lost while the model is loaded
_FEW = 64
"""Numbers of which Python finds the least before numpy has begun."""
_CHUNK = 128
"""Tokens of prompts in a batch where devices form a pipeline: the second works on one while the first has the next."""

_REPLACED = (
    "it is read where it lies on the disk: replace it by renaming another file to its name, or start with --no-mmap, "
    "which reads it into memory at once"
)


class Profile(NamedTuple):
    """A graph whose inputs are still what they were, and the times of its operations."""

    graph: Graph
    operations: list[OperationTime]


class ModelRunner:
    """Runs `model` (read from `file`) on `devices` with a memory of `n_cells` tokens of up to `n_sequences` sequences,
    of up to `n_ctx` tokens each (0: all), and batches of up to `max_batch` tokens. `whole`, `turned` and
    `n_drafted`: see Memory. `output` is what batches give: logits, or the numbers an embedding is made of. `placement`
    says what lies where (None: all on the first device, which must be this machine's). `mlock` keeps the weights that
    lie here in RAM; a warning says so where the system refuses. `observer` has outputs of its own in graphs, where all
    lies on one device (`read`). `reconnect` and `replace` serve `restore`; `wait`: seconds that devices which are lost
    while the model is loaded are waited for. `features`: see BatchShape.
    """

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        devices: Sequence[Device],
        placement: Placement | None = None,
        *,
        n_cells: int,
        n_ctx: int = 0,
        n_sequences: int = 1,
        max_batch: int = 512,
        whole: bool = False,
        output: Output = Output.LOGITS,
        type_k: TensorType = TensorType.F16,
        type_v: TensorType = TensorType.F16,
        turned: bool = True,
        n_drafted: int = 0,
        mlock: bool = False,
        progress: Progress | None = None,
        reconnect: Reconnect | None = None,
        replace: Replace | None = None,
        wait: float = 0.0,
        observer: ProductObserver | None = None,
        features: tuple[int, ...] = (),
    ) -> None:
        self.file, self.model = file, model
        self.devices = list(devices)
        self.n_vocab = model.hparams.n_vocab
        self.width = model.width(output)
        self.features_width = model.features_width(features)
        self.max_batch = max_batch
        memory = self.memory = model.memory(
            n_cells,
            type_k,
            type_v,
            n_sequences=n_sequences,
            max_batch=max_batch,
            whole=whole,
            n_ctx=n_ctx,
            turned=turned,
            n_drafted=n_drafted,
        )
        self._tensors = DeviceTensors(file, model, memory, self.devices, placement, mlock, observer)
        n_states = n_sequences if memory.has_states else 0
        self._graphs = Graphs(
            self._tensors,
            self.devices,
            max_batch,
            memory.n_cells,
            output,
            len(model.adapters),
            n_states,
            features,
            model.takes,
        )
        self._pipeline = Pipeline(self.devices, output.value, self.width)
        self._watches = [
            watch(path, opened.shard_data(i), _REPLACED)
            for opened in (file, *(adapter.file for adapter in model.adapters))
            for i, path in enumerate(opened.shard_paths)
        ]

        recovery = self.recovery = DeviceRecovery(
            self.devices, self._tensors, self._pipeline, self._graphs.largest, self._settle, reconnect, replace
        )
        self.watch, self.lost, self.restore = recovery.watch, recovery.lost, recovery.restore
        self.away, self.call_back, self.move_back = recovery.away, recovery.call_back, recovery.move_back
        self.times = self._pipeline.times

        self.rows = DeviceRows(file, model, memory, self._tensors, self._pipeline, recovery)
        self.cell_kind = self.rows.kind
        memory.attach(self.rows)
        self._wait = wait
        try:
            self._with_all(lambda: self._settle(progress), progress)
        except BaseException:
            self.close()
            raise

    @property
    def placement(self) -> Placement | None:
        """What lies where now."""
        return self._tensors.placement

    @property
    def numerics(self) -> str | None:
        """See Forward."""
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
        """Numbers of devices that pass what they compute straight to another, and of those."""
        return self._pipeline.ring.pairs

    def exactly(self, n: int) -> int:
        """The most of `n` tokens that a batch has without others to fill it up."""
        return self._graphs.fit(n)

    def read(self, name: str) -> NDArray[np.float32]:
        """An observer's output as the last batch left it; its memory may have further numbers behind it."""
        device, tensor = self._tensors.given(name)
        return np.frombuffer(self.devices[device].read(tensor, 0, tensor.nbytes).result(), np.float32)

    @property
    def depth(self) -> int:
        """See Forward."""
        return self._pipeline.depth.value

    @property
    def launches(self) -> bool:
        """See Forward: with states a batch may have parts, and one waits for the other."""
        return len(self.devices) == 1 and self.placement is None and not self.memory.has_states

    @property
    def chunk(self) -> int:
        """See Forward."""
        return self.max_batch if self._pipeline.depth.least == 1 else min(_CHUNK, self.max_batch)

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
    ) -> Future[NDArray[np.float32]]:
        """See Forward."""
        lost = self.lost()
        if lost is not None:
            raise lost
        try:
            n = self.memory.n_before
            before = windows_before(tokens, spans, n) if n else None
            parts = self.memory.place(spans, self._graphs.fit)
        except ValueError as error:
            raise ForwardError(str(error)) from error
        if parts[0].tokens is None:
            batch = Batch(parts[0].positions, outputs, parts[0].rows, tokens, given=given, before=before)
            return self.submit(batch, scales, features, stage)
        return self._start_each(parts, tokens, outputs, scales, features, before)

    def _start_each(
        self,
        parts: Sequence[Placed],
        tokens: NDArray[np.int32],
        outputs: NDArray[np.int32],
        scales: Scales,
        features: NDArray[np.float32] | None,
        before: NDArray[np.int32] | None,
    ) -> Future[NDArray[np.float32]]:
        """Evaluates a batch in the parts that it was divided into."""
        if len(tokens) > self.max_batch:
            raise ForwardError(f"a batch of {len(tokens)} tokens; the device takes 1 to {self.max_batch}")
        joined = JoinedRows(len(parts), len(outputs), self.width, features)
        for part in parts:
            assert part.tokens is not None
            places = np.flatnonzero(np.isin(outputs, part.tokens))
            wanted = np.searchsorted(part.tokens, outputs[places])
            behind = None if before is None else before[part.tokens]
            batch = Batch(part.positions, wanted, part.rows, tokens[part.tokens], n_seqs=part.n_seqs, before=behind)
            own = None if features is None else np.empty((len(part.tokens), self.features_width), np.float32)
            joined.add(self.submit(batch, scales, own), places, part.tokens, own)
        return joined.future

    def submit(
        self, batch: Batch, scales: Scales = (), features: NDArray[np.float32] | None = None, stage: int = 0
    ) -> Future[NDArray[np.float32]]:
        """Evaluates a batch; see Forward.start."""
        used = self._check(batch)
        lost = self.lost()
        if lost is not None:
            raise lost
        embeddings = batch.tokens is None
        if embeddings and not self._graphs.largest[-1].embeddings:
            self._make_room_for_embeddings()
        n_tokens, n_outputs = batch.n_tokens, len(batch.outputs)
        given = 0 if batch.given is None else batch.given.shape[1]
        shape = self._graphs.shape(n_tokens, n_outputs, used, scales, embeddings, batch.n_seqs, given, stage)
        return self._begin(shape, batch, features)

    def _make_room_for_embeddings(self) -> None:
        """Before the first batch of embeddings, as few models are ever given one."""
        self._pipeline.stand_still()
        self._graphs.largest.append(dataclasses.replace(self._graphs.largest[0], embeddings=True))
        try:
            self._settle()
        except BaseException:
            self._graphs.largest.pop()
            raise

    def _begin(
        self, shape: BatchShape, batch: Batch, features: NDArray[np.float32] | None = None
    ) -> Future[NDArray[np.float32]]:
        """Starts a batch with the graph for a shape, whose inputs fill up what the batch lacks."""
        graph = self._graphs.get(shape)
        return self._pipeline.start(graph.parts, graph.feeds, batch, features)

    def _check(self, batch: Batch) -> int:
        """How many of the first cells a batch sees; raises ForwardError for one that cannot be."""
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
        if tokens is None and (embeddings is None or embeddings.shape != (n, self.model.hparams.n_embd)):
            raise ForwardError(f"{n} tokens without embeddings of {self.model.hparams.n_embd} elements")
        if len(outputs) and (len(outputs) > n or not _all_below(outputs, n)):
            raise ForwardError(f"an output that is no row of a batch of {n}")
        return used

    def warm_up(self, batch_sizes: list[int], progress: Progress | None = None, scales: Scales = ()) -> None:
        """Prepares these batch sizes (their kernels come from the disk cache where they are there).

        What else requests are likely to need is left to `prepare_ahead`.
        """
        self._with_all(lambda: self._graphs.warm_up(batch_sizes, progress, scales), progress)

    def _with_all(self, work: Callable[[], None], progress: Progress | None) -> None:
        """Does work of loading, again whenever a device was lost meanwhile and is back in time."""
        until, since = 0.0, ""
        while True:
            try:
                work()
                if (gone := self.lost()) is None:
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
                    self.restore(False)
                    back = True
                except DeviceLost as error:
                    lost = error
                    time.sleep(_AGAIN)

    def prepare_ahead(self) -> bool:
        """Gets one more shape ready that requests are likely to need."""
        shape = self._graphs.next_ahead()
        if shape is None:
            return False
        if self.placement is None:
            self._graphs.prepare(shape)
            return True
        # A batch of nothing but filling, so that devices elsewhere have its programs.
        nothing = np.empty(0, np.int64)
        with suppress(DeviceLost):
            self._begin(shape, Batch(nothing, nothing, self.memory.nowhere().rows, nothing)).result()
        return True

    def profile(self, n: int, start: int = 0, repeats: int = 20) -> Profile:
        """Times of each operation for `n` tokens of one sequence from position `start` on, the last with logits:
        medians over `repeats` passes.

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
        handle.used = start  # whatever lies there
        spans = [Span(handle, start, n, before=[0] * start)]
        self.start(np.zeros(n, np.int32), spans, np.array([n - 1], np.int32)).result()
        self.memory.free(handle)
        graph = self._graphs.get(self._graphs.shape(n, 1, start + n, n_seqs=n_seqs)).parts[0].graph
        return Profile(graph, device.profile(graph, repeats))

    def _settle(self, progress: Progress | None = None) -> None:
        """Gives devices what they lack by the placement of now."""
        self._graphs.clear()
        parts = self._tensors.settle(self._graphs.largest, progress)
        self._pipeline.set_up(parts, self._tensors.used)

    def close(self) -> None:
        """Ends the threads and lets go of the memory."""
        self._pipeline.close()
        self.recovery.close()
        for device in self.devices:
            device.close()
        for end in self._watches:
            end()


def _all_below(numbers: NDArray[np.integer], limit: int) -> bool:
    """Whether all are from 0 to below `limit`."""
    return _least(numbers) >= 0 and _greatest(numbers) < limit


def _least(numbers: NDArray[np.integer]) -> int:
    return min(numbers.ravel().tolist()) if numbers.size <= _FEW else int(numbers.min())


def _greatest(numbers: NDArray[np.integer]) -> int:
    return max(numbers.ravel().tolist()) if numbers.size <= _FEW else int(numbers.max())
