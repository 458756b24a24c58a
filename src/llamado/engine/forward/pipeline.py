"""Pipeline of batches through devices: each part of a graph runs on the thread of its device, with several batches in
flight.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.devices.device import Arrival, Bytes, Device, DeviceError, DeviceFull, DeviceLost, TensorLink
from llamado.devices.split.partition import GraphPart
from llamado.engine.forward.contract import ForwardError
from llamado.engine.forward.local_batches import LocalBatches
from llamado.engine.forward.ring import Ring
from llamado.engine.forward.times import Times
from llamado.ggml.tensor import Tensor
from llamado.models.batch import FEATURES, Batch
from llamado.models.inputs import Input

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_WINDOW = 0.15  # seconds in which batches are counted before another depth is tried
_FORGET = 32  # windows


class Depth:
    """Number of batches in flight: the one with the most rows of logits per second, found by repeated trials.

    While devices wait for links, another batch in flight costs the others nothing; once devices are busy it only makes
    batches smaller, and smaller batches cost more per row.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._steps = [n for n in _DEPTHS if n >= least]
        self._at = 0
        self._rates: dict[int, float] = {}  # by index in `_steps`
        self._began = 0.0
        self._rows = 0
        self._windows = 0
        self._spare = 0

    @property
    def value(self) -> int:
        return self._steps[self._at]

    def note(self, n_rows: int, now: float, full: bool) -> None:
        """Record that a batch of generating slots yielded `n_rows` rows; `full`: the allowed number was in flight until
        then.
        """
        if not full:
            self._rows = 0
            self._spare += 1
            if self._spare > 2 * self.value and self._at:  # there are not enough sequences for this depth
                self._spare = 0
                self._rates[self._at] = 0.0
                self._at -= 1
            return
        self._spare = 0
        if not self._rows:
            self._began = now
        self._rows += n_rows
        seconds = now - self._began
        if seconds < _WINDOW or self._rows < 4 * self.value:
            return
        rate, self._rows = (self._rows - n_rows) / seconds, 0
        known = self._rates.get(self._at)
        self._rates[self._at] = rate if known is None else 0.5 * (known + rate)
        self._windows += 1
        if self._windows % _FORGET == 0:  # conditions may have changed
            self._rates = {self._at: self._rates[self._at]}
        best = max(self._rates, key=self._rates.__getitem__)
        if self._rates[best] > 1.03 * self._rates[self._at]:
            self._at = best
        else:  # as good as any: try its neighbors
            near = (self._at + 1, self._at - 1)
            self._at = next((at for at in near if 0 <= at < len(self._steps) and at not in self._rates), self._at)


class _LinkedResult(NamedTuple):
    """A result sent over a link, and its sequence number there."""

    link: TensorLink
    number: int


class _PartTimes:
    """Times at which a part was queued for its device and sent there (time.monotonic()), and link data for PartTime."""

    __slots__ = ("began", "n_bytes", "queued", "trips")

    def __init__(self, queued: float) -> None:
        self.queued, self.began = queued, time.monotonic()
        self.n_bytes = 0
        self.trips = 1.0


class _Job:
    """A batch on its way through the parts of its graph."""

    __slots__ = (
        "began", "features", "future", "index", "inputs", "n_outputs", "n_tokens", "notes", "parts", "queued", "sent",
        "unread", "values",
    )  # fmt: skip

    def __init__(
        self,
        parts: Sequence[GraphPart],
        inputs: Mapping[str, Bytes],
        n_tokens: int,
        n_outputs: int,
        features: NDArray[np.float32] | None,
    ) -> None:
        self.parts = parts
        self.features = features
        self.inputs = inputs
        self.n_tokens = n_tokens
        self.n_outputs = n_outputs
        self.values: dict[str, Bytes] = {}
        self.sent: dict[str, _LinkedResult] = {}  # results on their way to the device of the next part
        self.index = 0  # of the part that was last sent to its device
        self.unread = 0  # reads in flight
        self.notes: list[_PartTimes] = []  # of the parts that were sent
        self.future: Future[NDArray[np.float32]] = Future()
        self.began = self.queued = time.monotonic()

    @property
    def ready(self) -> bool:
        """True if it may leave the device of its last sent part."""
        if self.index + 1 == len(self.parts):
            return not self.unread
        return all(name in self.sent or name in self.values for name in self.parts[self.index + 1].takes)


class JoinedRows:
    """The rows of several batches combined to one: `n_rows` of `width` numbers, in `future` once all are done.

    `features`: receives those of their tokens.
    """

    def __init__(self, n_batches: int, n_rows: int, width: int, features: NDArray[np.float32] | None = None) -> None:
        self._features = features
        self.future: Future[NDArray[np.float32]] = Future()
        self._rows = np.empty((n_rows, width), np.float32)
        self._left = n_batches
        self._lock = threading.Lock()

    def add(
        self,
        batch: Future[NDArray[np.float32]],
        places: NDArray[np.integer],
        tokens: NDArray[np.integer],
        features: NDArray[np.float32] | None,
    ) -> None:
        """Add a batch: the positions of its rows and of its tokens among all, and its `features`."""
        batch.add_done_callback(lambda done: self._arrived(done, places, tokens, features))

    def _arrived(
        self,
        batch: Future[NDArray[np.float32]],
        places: NDArray[np.integer],
        tokens: NDArray[np.integer],
        features: NDArray[np.float32] | None,
    ) -> None:
        try:
            self._rows[places] = batch.result()
            if self._features is not None and features is not None:
                self._features[tokens] = features
        except BaseException as error:
            with suppress(Exception):  # another one failed before
                self.future.set_exception(error)
            return
        with self._lock:
            self._left -= 1
            last = not self._left
        if last:
            self.future.set_result(self._rows)


class Pipeline:
    """Runs batches on `devices` (a list whose members may be replaced while nothing runs).

    `output`: the name of the graphs' result, with `width` numbers per row. `on_lost` is called, from any thread, when a
    batch failed because a device, or a link between two, is lost. `on_full` is called with the number of a device that
    is out of memory, and returns the error of the batch.

    If devices are linked (`ring`), results of a part go straight to the device of the next part, which is sent there
    immediately: its device waits for the bytes. All other results come here and are sent on.
    """

    def __init__(self, devices: Sequence[Device], output: str, width: int) -> None:
        self.depth = Depth(1)
        self.times = Times()
        self.on_lost: Callable[[], None] = lambda: None
        self.on_full: Callable[[int, DeviceFull], DeviceError] = lambda device, error: error
        self._devices = devices
        self._output = output
        self._width = width
        self.ring = Ring(devices)
        self._here = LocalBatches(output, width, self.times if len(devices) > 1 else None)
        # batches in flight, and the devices of their parts
        self._flying: dict[Future[NDArray[np.float32]], list[int]] = {}
        self._order = threading.Lock()
        # by device: batches in the order in which they leave it
        self._leaving: defaultdict[int, deque[_Job]] = defaultdict(deque)
        self._queues: dict[int, queue.SimpleQueue[tuple[_Job, int] | threading.Event | None]] = {}
        self._closed = self._failed = self._is_alone = False

    def set_up(self, parts: Sequence[GraphPart], used: Sequence[int]) -> None:
        """Set the parts of following batches, on devices of these numbers."""
        self._here.forget()
        self.depth = Depth(len({part.device for part in parts[1:]}) if len(parts) > 1 else 1)
        # otherwise the threads of the devices run everything, so that batches of fewer parts do not overtake
        self._is_alone = len(parts) == 1 and self._devices[parts[0].device].local
        for device in () if self._is_alone else used:
            if device not in self._queues:
                self._queues[device] = queue.SimpleQueue()
                work = (device, self._queues[device])
                threading.Thread(target=self._serve, args=work, name=f"llamado-part-{device}", daemon=True).start()
        self.ring.form(parts)

    def start(
        self,
        parts: Sequence[GraphPart],
        feeds: Sequence[Input],
        batch: Batch,
        features: NDArray[np.float32] | None = None,
    ) -> Future[NDArray[np.float32]]:
        """Start a batch; `feeds` fill the graph's inputs. The result has the rows of its outputs; `features` receives
        as many rows of hidden states as it has (see BatchShape).

        A batch that only this machine computes is completed when its result is read.
        """
        if self._is_alone and len(parts) == 1:
            return self._here.run(self._devices[parts[0].device], parts[0], feeds, batch, features)
        # several devices may need the same input, and later
        inputs = {feed.name: feed.fill(batch) for feed in feeds}
        job = _Job(parts, inputs, batch.n_tokens, len(batch.outputs), features)
        devices = [part.device for part in parts]
        if overtaken := [other for other, theirs in [*self._flying.items()] if _overtakes(devices, theirs)]:
            wait(overtaken)
        self._flying[job.future] = devices
        job.future.add_done_callback(lambda done: self._flying.pop(done, None))
        self._hand_over(job, 0)
        return job.future

    def finish(self) -> list[Future[NDArray[np.float32]]]:
        """Wait for the batches in flight and return them. Parts of abandoned batches may still be running
        afterwards.
        """
        flying = list(self._flying)
        wait(flying)
        return flying

    def wait_idle(self) -> None:
        """Wait until no thread works on any batch, including abandoned ones."""
        self.finish()
        if self._failed:  # results in links are not taken any more, and devices may wait for results that were not sent
            self._failed = False
            self.ring.break_up()
        reached = []
        for jobs in self._queues.values():
            reached.append(threading.Event())
            jobs.put(reached[-1])
        for event in reached:
            while not event.wait(0.1):
                if self._closed:
                    raise ForwardError("the model is being closed")

    def fail_in_flight(self, error: DeviceLost) -> None:
        """Fail all batches in flight, so that no caller waits for parts that are still computed."""
        self._failed = True
        for future in list(self._flying):
            with suppress(Exception):  # it ended meanwhile
                future.set_exception(error)

    def close(self) -> None:
        """Stop the threads."""
        self._closed = True
        for jobs in self._queues.values():
            jobs.put(None)

    # -- processing of a batch ---------------------------------------------------------------------------------------

    def _run(self, job: _Job, index: int) -> None:
        """Run one part of a batch on its device; its results are read, or go to the next device, and the next part
        follows.
        """
        part = job.parts[index]
        device = self._devices[part.device]
        note = _PartTimes(job.queued)
        job.notes.append(note)
        for name, tensor in part.graph.inputs.items():
            device.write(tensor, job.inputs[name])
            note.n_bytes += job.inputs[name].nbytes
        arrivals: list[Future[Arrival]] = []
        for name, tensor in part.takes.items():
            sent = job.sent.pop(name, None)
            if sent is None:
                device.write(tensor, job.values[name])
                note.n_bytes += tensor.nbytes
            else:
                arrivals.append(sent.link.receive(sent.number, tensor, tensor.nbytes))
        device.submit(part.graph)
        wanted = self._pass_on(job, index)
        passed = bool(job.sent)
        note.trips = 1.0 + 0.5 * passed - bool(arrivals)
        rows, states = part.graph.outputs.get(self._output), part.graph.outputs.get(FEATURES)
        if job.features is not None and states is not None:
            wanted.append((FEATURES, states, job.features.nbytes))
        if rows is not None:
            wanted.append((self._output, rows, 4 * self._width * job.n_outputs))
        elif not wanted and not passed:  # a chunk that only fills the cache: reading any byte shows that it is done
            name, tensor = next(iter(part.graph.inputs.items()))
            wanted.append(("", tensor, 4))
        left = len(wanted)
        note.n_bytes += sum(size for _, _, size in wanted)
        lock = threading.Lock()

        def arrived(name: str, future: Future[Bytes]) -> None:
            nonlocal left
            try:
                data = future.result()
                # the device's working memory is overwritten by the next batch
                job.values[name] = data.copy() if device.local else data
            except BaseException as error:
                self._fail(job, error)
                return
            with lock:
                left -= 1
                last = not left
            if last and not passed:
                self.times.part(part.device, note.queued, note.began, note.n_bytes, trips=note.trips)
            self._leave(job, 1)

        with self._order:
            job.index = index
            job.unread += left
            self._leaving[part.device].append(job)
        if arrivals:  # they come in order
            arrivals[-1].add_done_callback(lambda f: self._handed_on(job, index, f))
        for name, tensor, size in wanted:
            future = device.read(tensor, 0, size)
            future.add_done_callback(lambda f, name=name: arrived(name, f))  # type: ignore[misc]
        if passed:  # it may leave before its reads, if any, have arrived
            self._leave(job, 0)

    def _pass_on(self, job: _Job, index: int) -> list[tuple[str, Tensor, int]]:
        """Send a part's results to the next device if there is a link; return the tensors to read, and their sizes."""
        part, *later = job.parts[index:]
        link = self.ring.link(part.device, later[0].device) if later else None
        wanted = []
        for name, tensor in part.gives.items():
            if link is not None and name in later[0].takes:
                job.sent[name] = _LinkedResult(link, link.send(tensor, tensor.nbytes))
                job.notes[index].n_bytes += tensor.nbytes
                if not any(name in other.takes for other in later[1:]):
                    continue
            wanted.append((name, tensor, tensor.nbytes))
        return wanted

    def _handed_on(self, job: _Job, index: int, arrival: Future[Arrival]) -> None:
        """Handle the arrival of a part's inputs over a link: its device can begin, and the previous device is done."""
        try:
            computed = arrival.result().computed
        except BaseException as error:
            self._fail(job, error)
            return
        before, note = job.notes[index - 1 : index + 1]
        device = job.parts[index - 1].device
        self.times.part(device, before.queued, before.began, before.n_bytes, trips=before.trips, computed=computed)
        note.queued = note.began = time.monotonic()

    def _leave(self, job: _Job, n_read: int) -> None:
        """Record `n_read` arrived reads. Batches leave a device in the order in which they were sent there: to the
        device of their next part, or to the caller.
        """
        ended = []
        with self._order:
            job.unread -= n_read
            leaving = self._leaving[job.parts[job.index].device]
            while leaving and (leaving[0].ready or leaving[0].future.done()):
                one = leaving.popleft()
                if one.future.done():
                    continue
                if one.index + 1 == len(one.parts):
                    ended.append(one)
                else:
                    self._hand_over(one, one.index + 1)
        for one in ended:
            self._end(one)

    def _hand_over(self, job: _Job, index: int) -> None:
        job.queued = time.monotonic()
        self._queues[job.parts[index].device].put((job, index))

    def _end(self, job: _Job) -> None:
        """Complete a batch."""
        rows = job.values.get(self._output, np.empty(0, np.uint8)).view(np.float32)
        if job.features is not None:
            job.features[:] = job.values[FEATURES].view(np.float32).reshape(job.features.shape)
        if job.n_outputs and 2 * job.n_tokens <= 3 * job.n_outputs:  # mostly of generating slots
            # the allowed number is in flight, including the batch that just ended
            full = len(self._flying) >= self.depth.value
            self.depth.note(job.n_outputs, time.perf_counter(), full)
        self.times.batch(job.began, job.n_outputs)
        with suppress(Exception):  # it failed meanwhile
            job.future.set_result(rows.reshape(-1, self._width))

    def _serve(self, device: int, jobs: queue.SimpleQueue[tuple[_Job, int] | threading.Event | None]) -> None:
        """Thread of a device: run its parts in the order in which batches arrive."""
        while (item := jobs.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            job, index = item
            if job.future.done():
                continue
            try:
                self._run(job, index)
            except DeviceFull as error:
                self._fail(job, self.on_full(device, error))
            except BaseException as error:
                self._fail(job, error)

    def _fail(self, job: _Job, error: BaseException) -> None:
        self._failed = True
        if isinstance(error, DeviceLost):
            self.on_lost()
        with suppress(Exception):
            job.future.set_exception(error)
        self._leave(job, 0)


def _overtakes(devices: Sequence[int], others: Sequence[int]) -> bool:
    """Return True if a batch with parts on these devices would get ahead of one in flight: it begins at a device that
    the other one reaches later. Batches of embeddings do, because they need no lookup of tokens.
    """
    return devices[0] != others[0] and devices[0] in others
