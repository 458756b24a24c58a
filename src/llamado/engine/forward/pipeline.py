"""Batches on their way through devices: each part of a graph on the thread of its device, one batch behind another."""

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

from llamado.devices.device import Arrival, Bytes, Device, DeviceLost, TensorLink
from llamado.devices.split.partition import GraphPart
from llamado.engine.forward.contract import ForwardError
from llamado.engine.forward.here import BatchesHere
from llamado.engine.forward.ring import Ring
from llamado.engine.forward.times import Times
from llamado.ggml.tensor import Tensor
from llamado.models.batch import FEATURES, Batch
from llamado.models.inputs import Input

_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_WINDOW = 0.15  # seconds in which batches are counted before another number of them is tried
_FORGET = 32  # windows


class Depth:
    """How many batches to have on their way: as many as gave most rows of logits per second, tried and tried again.

    While devices wait for links, another batch on the way costs the others nothing; once devices are busy it only makes
    batches smaller, and smaller batches cost more per row.
    """

    def __init__(self, least: int) -> None:
        self.least = least
        self._steps = [n for n in _DEPTHS if n >= least]
        self._at = 0
        self._rates: dict[int, float] = {}  # by place in `_steps`
        self._began = 0.0
        self._rows = 0
        self._windows = 0
        self._spare = 0

    @property
    def value(self) -> int:
        return self._steps[self._at]

    def note(self, n_rows: int, now: float, full: bool) -> None:
        """A batch of generating slots gave `n_rows` rows; `full`: as many as allowed were on their way till then."""
        if not full:
            self._rows = 0
            self._spare += 1
            if self._spare > 2 * self.value and self._at:  # there are not sequences enough for so many
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
        if self._windows % _FORGET == 0:  # what it was like elsewhere may have changed
            self._rates = {self._at: self._rates[self._at]}
        best = max(self._rates, key=self._rates.__getitem__)
        if self._rates[best] > 1.03 * self._rates[self._at]:
            self._at = best
        else:  # as good as any: look at its neighbours
            near = (self._at + 1, self._at - 1)
            self._at = next((at for at in near if 0 <= at < len(self._steps) and at not in self._rates), self._at)


class _Sent(NamedTuple):
    """What goes by a link, and its number there."""

    link: TensorLink
    number: int


class _Note:
    """When a part was handed to its device and sent there (time.monotonic()), and what PartTime has of links."""

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
        self.sent: dict[str, _Sent] = {}  # what is on its way to the device of the next part
        self.index = 0  # of the part that was sent to its device last
        self.unread = 0  # reads on their way
        self.notes: list[_Note] = []  # of the parts that were sent
        self.future: Future[NDArray[np.float32]] = Future()
        self.began = self.queued = time.monotonic()

    @property
    def ready(self) -> bool:
        """Whether it may leave the device of the part that was sent last."""
        if self.index + 1 == len(self.parts):
            return not self.unread
        return all(name in self.sent or name in self.values for name in self.parts[self.index + 1].takes)


class JoinedRows:
    """The rows of several batches as those of one: `n_rows` of `width` numbers, in `future` once all are there.

    `features`: gets those of their tokens.
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
        """One more batch, the places of its rows among all, and those of its tokens, of which it has `features`."""
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
    """Runs batches on `devices` (a list that may get others in their places while nothing runs).

    `output`: the name of what graphs give, `width` numbers a row. `on_lost` is called, from any thread, when a batch
    failed because a device is lost, or a link between two.

    Where devices are linked (`ring`), what a part gives goes straight to the device of the next part, which is sent
    behind it at once: its device waits for the bytes. All else comes here and is sent on.
    """

    def __init__(self, devices: Sequence[Device], output: str, width: int) -> None:
        self.depth = Depth(1)
        self.times = Times()
        self.on_lost: Callable[[], None] = lambda: None
        self._devices = devices
        self._output = output
        self._width = width
        self.ring = Ring(devices)
        self._here = BatchesHere(output, width, self.times if len(devices) > 1 else None)
        self._flying: set[Future[NDArray[np.float32]]] = set()
        self._order = threading.Lock()
        # By device: batches in the order in which they leave it.
        self._leaving: defaultdict[int, deque[_Job]] = defaultdict(deque)
        self._queues: dict[int, queue.SimpleQueue[tuple[_Job, int] | threading.Event | None]] = {}
        self._closed = self._failed = False

    def set_up(self, parts: Sequence[GraphPart], used: Sequence[int]) -> None:
        """From now on batches go through parts like these, on devices of these numbers."""
        self._here.forget()
        self.depth = Depth(len({part.device for part in parts[1:]}) if len(parts) > 1 else 1)
        alone = len(parts) == 1 and self._devices[parts[0].device].local
        for device in () if alone else used:
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
        """Starts a batch; `feeds` fill the graph's inputs. The rows of its outputs are wanted; `features` gets as many
        rows of hidden states as it has (see BatchShape).

        A batch that this machine alone computes is done when its rows are asked for.
        """
        if len(parts) == 1 and self._devices[parts[0].device].local:
            return self._here.run(self._devices[parts[0].device], parts[0], feeds, batch, features)
        # Several devices may want the same input, and later.
        inputs = {feed.name: feed.fill(batch) for feed in feeds}
        job = _Job(parts, inputs, batch.n_tokens, len(batch.outputs), features)
        self._flying.add(job.future)
        job.future.add_done_callback(self._flying.discard)
        self._hand_over(job, 0)
        return job.future

    def finish(self) -> list[Future[NDArray[np.float32]]]:
        """Waits for the batches on their way; those that were. Batches given up may still be computed after it."""
        flying = list(self._flying)
        wait(flying)
        return flying

    def stand_still(self) -> None:
        """Returns when no thread works on a batch any more, not even on one that nobody waits for."""
        self.finish()
        if self._failed:  # what was sent by links is taken by nobody, and devices may wait for what was not sent
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

    def give_up(self, error: DeviceLost) -> None:
        """Whoever waits for a batch need not wait for the parts of it that are still computed."""
        self._failed = True
        for future in list(self._flying):
            with suppress(Exception):  # it came to its end meanwhile
                future.set_exception(error)

    def close(self) -> None:
        """Ends the threads."""
        self._closed = True
        for jobs in self._queues.values():
            jobs.put(None)

    # -- the way of a batch ------------------------------------------------------------------------------------------

    def _run(self, job: _Job, index: int) -> None:
        """One part of a batch on its device; what it gives is read, or goes to the next device, and the next part
        follows.
        """
        part = job.parts[index]
        device = self._devices[part.device]
        note = _Note(job.queued)
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
        elif not wanted and not passed:  # a chunk that only fills the cache: any byte says that it is done
            name, tensor = next(iter(part.graph.inputs.items()))
            wanted.append(("", tensor, 4))
        left = len(wanted)
        note.n_bytes += sum(size for _, _, size in wanted)
        lock = threading.Lock()

        def arrived(name: str, future: Future[Bytes]) -> None:
            nonlocal left
            try:
                data = future.result()
                # what lies in the device's working memory is gone with the next batch
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
        if passed:  # it may leave before what is read, if anything is, has come
            self._leave(job, 0)

    def _pass_on(self, job: _Job, index: int) -> list[tuple[str, Tensor, int]]:
        """Sends what a part gives to the next device, where there is a link; what is to be read, and how much of it."""
        part, *later = job.parts[index:]
        link = self.ring.link(part.device, later[0].device) if later else None
        wanted = []
        for name, tensor in part.gives.items():
            if link is not None and name in later[0].takes:
                job.sent[name] = _Sent(link, link.send(tensor, tensor.nbytes))
                job.notes[index].n_bytes += tensor.nbytes
                if not any(name in other.takes for other in later[1:]):
                    continue
            wanted.append((name, tensor, tensor.nbytes))
        return wanted

    def _handed_on(self, job: _Job, index: int, arrival: Future[Arrival]) -> None:
        """What a part takes has come by a link: its device can begin, and the one before was done with its part."""
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
        """Takes note of reads that came. Batches leave a device in the order in which they were sent there: each to
        the device of its next part, or to whoever waits for it.
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
        """Hands the results of a batch to whoever waits for it."""
        rows = job.values.get(self._output, np.empty(0, np.uint8)).view(np.float32)
        if job.features is not None:
            job.features[:] = job.values[FEATURES].view(np.float32).reshape(job.features.shape)
        if job.n_outputs and 2 * job.n_tokens <= 3 * job.n_outputs:  # mostly of generating slots
            # As many as are allowed are on their way; the one that just ended counts.
            full = len(self._flying) >= self.depth.value
            self.depth.note(job.n_outputs, time.perf_counter(), full)
        self.times.batch(job.began, job.n_outputs)
        with suppress(Exception):  # it failed meanwhile
            job.future.set_result(rows.reshape(-1, self._width))

    def _serve(self, device: int, jobs: queue.SimpleQueue[tuple[_Job, int] | threading.Event | None]) -> None:
        """The thread of a device: its parts in the order in which batches come to them."""
        while (item := jobs.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            job, index = item
            if job.future.done():
                continue
            try:
                self._run(job, index)
            except BaseException as error:
                self._fail(job, error)

    def _fail(self, job: _Job, error: BaseException) -> None:
        self._failed = True
        if isinstance(error, DeviceLost):
            self.on_lost()
        with suppress(Exception):
            job.future.set_exception(error)
        self._leave(job, 0)
