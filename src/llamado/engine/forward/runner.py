"""A model whose layers lie on one device or many: the Forward that the engine drives.

Weights on this machine stay where the file's mapping has them; other devices get theirs once. Inputs, the KV cache and
what crosses between devices have fixed places, so that a graph built once per shape is run again with new contents.
Shapes are few: larger batches are filled up with tokens that see nothing and are seen by none (their keys go to a spare
cell), and attention gets the cache in few sizes; it looks only at the cells a token may see, so the size costs nothing
but the mask.

With several devices a batch goes through the parts of its graph one after the other, each on the thread of its device,
and the next batch follows on its heels.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llamado.devices.cpu.device import CpuDevice, OperationTime
from llamado.devices.cpu.mapped import watch
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.device import Bytes, Device, DeviceLost
from llamado.devices.split.partition import Part, split
from llamado.devices.split.placement import held
from llamado.engine.forward.contract import CellKind, Cells, ForwardError, Scales
from llamado.engine.forward.fingerprint import fingerprint
from llamado.engine.request import Away
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import BatchShape, Model, Output

if TYPE_CHECKING:
    from llamado.devices.split.placement import Placement
    from llamado.models.adapter import Adapter

log = logging.getLogger(__name__)

_PAD = 256
_REACH = 1024
"""Cells that attention is given at least; where more are in use 8,192, then powers of two."""
_SPARE = 32  # cells behind the pool: the first takes what the filling tokens write
_GRAPHS_KEPT = 128
_KINDS_KEPT = 64
_HIDDEN = 0xFC00  # f16 −inf
_HUGE_BF16 = 0x7149  # 1e30: the product of a number of a cache with one of a query stays a float32 up to there
_CHUNK = 128
"""Tokens of prompts in a batch where devices form a pipeline: the second works on one while the first has the next."""
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_WINDOW = 0.15  # seconds in which batches are counted before another number of them is tried
_FORGET = 32
_SIZES = (*range(1, 9), *(n << shift for shift in range(2, 20) for n in (3, 4)))
"""Of batches on several devices: every new shape has to be sent and compiled."""

_REPLACED = (
    "it is read where it lies on the disk: replace it by renaming another file to its name, or start with --no-mmap, "
    "which reads it into memory at once"
)

Progress = Callable[[str, int, int], None]
Reconnect = Callable[[Device], Device]
"""A new device in the place of a lost one; raises DeviceLost while there is none."""
Replace = Callable[["Placement", Sequence[int]], "Placement"]
"""A placement that keeps to the devices of these numbers; raises DeviceError where they have no room."""


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


class _Job:
    """A batch on its way through the parts of its graph."""

    __slots__ = ("future", "inputs", "n_logits", "n_tokens", "parts", "values")

    def __init__(self, parts: Sequence[Part], inputs: Mapping[str, Bytes], n_tokens: int, n_logits: int) -> None:
        self.parts = parts
        self.inputs = inputs
        self.n_tokens = n_tokens
        self.n_logits = n_logits
        self.values: dict[str, Bytes] = {}
        self.future: Future[NDArray[np.float32]] = Future()


class PlacedForward:
    """Runs `model` (read from `file`) on `devices` with a pool of `n_cells` KV cells and batches of up to `max_batch`
    tokens. `output` is what batches give: logits, or the numbers an embedding is made of. `placement` says what lies
    where (None: all on the first device, which must be this machine's). `mlock` keeps the weights that lie here in RAM;
    a warning says so where the system refuses. `reconnect` and `replace` serve `restore`.
    """

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        devices: Sequence[Device],
        placement: Placement | None = None,
        *,
        n_cells: int,
        max_batch: int = 512,
        output: Output = Output.LOGITS,
        type_k: TensorType = TensorType.F16,
        type_v: TensorType = TensorType.F16,
        mlock: bool = False,
        progress: Progress | None = None,
        reconnect: Reconnect | None = None,
        replace: Replace | None = None,
    ) -> None:
        self.file, self.model = file, model
        self.devices = list(devices)
        self.placement = placement
        self.n_vocab = model.hparams.n_vocab
        self.output = output
        self.width = model.width(output)
        self.n_cells = -(-n_cells // _PAD) * _PAD
        self.max_batch = max_batch
        self._n_swa = model.hparams.n_swa
        self._mlock = mlock
        self._reconnect, self._replace = reconnect, replace
        self._watcher: Callable[[], None] = lambda: None
        self._weights = set(model.weights.values())
        self._added: dict[str, tuple[Adapter, str]] = {}  # adapters' tensors by name, and the weights they belong to
        for adapter in model.adapters:
            self._weights.update(adapter.tensors)
            for weight, pair in adapter.pairs.items():
                self._added |= {tensor.name: (adapter, weight) for tensor in pair}
        self._kv = model.kv_tensors(self.n_cells + _SPARE, type_k, type_v)
        self._type_k, self._type_v = type_k, type_v
        self._rows = tuple((k.nb[1], v.nb[1]) for k, v in zip(self._kv.k, self._kv.v, strict=True))
        self.cell_bytes = sum(k + v for k, v in self._rows)
        self._kinds: dict[Scales, CellKind] = {}
        self._caches = {t.name: i for i, t in enumerate(self._kv.k)} | {t.name: i for i, t in enumerate(self._kv.v)}
        self._own: dict[tuple[str, int], Tensor] = {}  # weights and caches by name and device
        self._held: set[tuple[str, int]] = set()  # those that have their bytes
        self._fixed: dict[tuple[str, int], Tensor] = {}  # memory of inputs, and of what crosses, by name and device
        self._graphs: OrderedDict[BatchShape, list[Part]] = OrderedDict()
        self._ahead: list[BatchShape] = []
        self._flying: set[Future[NDArray[np.float32]]] = set()
        self._queues: dict[int, queue.SimpleQueue[tuple[_Job, int] | threading.Event | None]] = {}
        self._used: list[int] = []  # devices that have part in a batch
        self._lost: DeviceLost | None = None
        self._lost_since = 0.0
        self._first = placement  # what devices that come back get back
        self._away: dict[int, Away] = {}  # by number of the device
        self._calling: set[int] = set()  # those that `call_back` has a hand on
        self._back: dict[int, tuple[Device, dict[tuple[str, int], Tensor]]] = {}  # those that are there, with weights
        self._closed = False
        self._depth = Depth(1)
        self._watches = [
            watch(path, opened.shard_data(i), _REPLACED)
            for opened in (file, *(adapter.file for adapter in model.adapters))
            for i, path in enumerate(opened.shard_paths)
        ]
        for device in self.devices:
            self._guard(device)
        try:
            self._settle(progress)
        except BaseException:
            self.close()
            raise

    # -- what lies where ---------------------------------------------------------------------------------------------

    def _home(self, placement: Placement, leaf: Tensor, node: Tensor) -> int | None:
        """Device of a weight or of a layer's cache; see `split`."""
        name = leaf.name
        if name in self._added:  # beside the weight that it is for
            weight = self._added[name][1]
            return 0 if weight == "token_embd.weight" else placement.device_of(weight)
        if name in self._caches:
            return placement.layers[self._caches[name]]
        if leaf not in self._weights or name == "rope_freqs.weight":  # small, and used in all layers
            return None
        if name == "token_embd.weight":
            # Where there is no matrix for the head, the embedding's serves as one.
            return 0 if node.op is Op.GET_ROWS else placement.device_of("output.weight")
        return placement.device_of(name)

    def _cut(self, shape: BatchShape) -> list[Part]:
        """The graph for a shape, in parts."""
        if self.placement is None:
            return [Part(0, self.model.build(shape, self._kv))]
        return self._divide(shape, self.placement, self._own)

    def _divide(self, shape: BatchShape, placement: Placement, own: dict[tuple[str, int], Tensor]) -> list[Part]:
        """The graph for a shape in parts; weights and caches that a part is the first to need are added to `own`."""
        graph = self.model.build(shape, self._kv)
        return split(graph, partial(self._home, placement), partial(_owned, own), 0)

    def _largest(self) -> list[BatchShape]:
        """Shapes that need all the memory there is to be."""
        largest = BatchShape(self.max_batch, self.max_batch, self.n_cells, self.output)
        if not self.model.adapters:
            return [largest]
        return [largest, dataclasses.replace(largest, scales=(1.0,) * len(self.model.adapters))]

    def _settle(self, progress: Progress | None = None) -> None:
        """Gives memory to all that needs some, and weights their bytes, where that was not done before.

        Where it fails, what was done so far need not be done again.
        """
        self._graphs.clear()
        if self.placement is None:
            self._own = {(t.name, 0): t for t in (*self._weights, *self._kv.k, *self._kv.v)}
        else:
            self._own = {key: tensor for key, tensor in self._own.items() if key in self._held}
        cuts = [self._cut(shape) for shape in self._largest()]
        parts = cuts[0]
        everything = [part for cut in cuts for part in cut]
        self._used = sorted({part.device for part in everything})
        fixed: dict[int, dict[tuple[str, int], Tensor]] = {device: {} for device in self._used}
        for part in everything:
            for name, tensor in _fixed(part):
                key = name, part.device
                place = fixed[part.device].get(key) or self._fixed.get(key)
                if place is None or place.nbytes < tensor.nbytes:
                    n = -(-tensor.nbytes // 4)
                    place = Tensor(TensorType.F32, (n, 1, 1, 1), (4, 4 * n, 4 * n, 4 * n), name=name)
                    fixed[part.device][key] = place
        weights: dict[int, list[Tensor]] = {device: [] for device in self._used}
        caches: dict[int, list[Tensor]] = {device: [] for device in self._used}
        for (name, device), tensor in self._own.items():
            if (name, device) not in self._held:
                (caches if name in self._caches else weights)[device].append(tensor)
        for device in self._used:
            places = [*fixed[device].values(), *caches[device]]
            if places:
                self.devices[device].place(places)
                self._fixed |= fixed[device]
                self._held.update((tensor.name, device) for tensor in caches[device])
        self._load(weights, progress)
        self._depth = Depth(len({part.device for part in parts[1:]}) if len(parts) > 1 else 1)
        for device in self._used if len(parts) > 1 else ():
            if device not in self._queues:
                self._queues[device] = queue.SimpleQueue()
                work = (device, self._queues[device])
                threading.Thread(target=self._serve, args=work, name=f"llamado-part-{device}", daemon=True).start()

    def _load(self, weights: Mapping[int, list[Tensor]], progress: Progress | None) -> None:
        """Weights to their devices, all at the same time."""
        bytes_of = {d: [(t, self._bytes(t.name)) for t in tensors] for d, tensors in weights.items() if tensors}
        total = sum(data.nbytes for d, pairs in bytes_of.items() for _, data in pairs if not self._here(d))
        done, lock = 0, threading.Lock()

        def load(device: int) -> None:
            def count(n: int) -> None:
                nonlocal done
                with lock:
                    done += n
                    if progress is not None:
                        progress(f"sending weights to {self.devices[device].name}", done, total)

            here = self._here(device)
            buffers = self.devices[device].load(bytes_of[device], None if here else count)
            if here and self._mlock:
                all(buffer.lock() for buffer in buffers if isinstance(buffer, CpuBuffer))  # the first refused says why
            self._held.update((tensor.name, device) for tensor in weights[device])

        if len(bytes_of) < 2:
            for device in bytes_of:
                load(device)
            return
        with ThreadPoolExecutor(len(bytes_of), "llamado-load") as pool:
            for _ in pool.map(load, bytes_of):
                pass

    def _bytes(self, name: str) -> Bytes:
        if name in self._added:
            return self._added[name][0].data(name)
        info = self.file.tensors[name]
        return self.file.shard_data(info.shard)[info.offset : info.offset + info.nbytes]

    def _here(self, device: int) -> bool:
        return isinstance(self.devices[device], CpuDevice)

    def _parts(self, shape: BatchShape) -> list[Part]:
        """The graph for a shape in parts, built and bound once."""
        parts = self._graphs.get(shape)
        if parts is not None:
            self._graphs.move_to_end(shape)
            return parts
        parts = self._graphs[shape] = self._cut(shape)
        for part in parts:
            for name, tensor in _fixed(part):
                place = self._fixed[name, part.device]
                tensor.buffer, tensor.offset = place.buffer, place.offset
        if len(self._graphs) > _GRAPHS_KEPT:
            self._graphs.popitem(last=False)
        return parts

    # -- batches -----------------------------------------------------------------------------------------------------

    @property
    def depth(self) -> int:
        """See Forward."""
        return self._depth.value

    @property
    def chunk(self) -> int:
        """See Forward."""
        return self.max_batch if self._depth.least == 1 else min(_CHUNK, self.max_batch)

    def warm_up(self, batch_sizes: list[int], progress: Progress | None = None, scales: Scales = ()) -> None:
        """Prepares these batch sizes (their kernels come from the disk cache where they are there).

        What else requests are likely to need is left to `prepare_ahead`.
        """
        # the largest first: it sets the size of a device's working memory
        sizes = sorted({n for n in batch_sizes if n <= self.max_batch}, reverse=True)
        shapes = [self._shape(n, min(n, 8), 1, scales) for n in sizes]
        for i, shape in enumerate(shapes):
            if progress is not None:
                progress("compiling kernels", i, len(shapes))
            self._prepare(shape)
        if self.placement is not None:
            sizes = [n for n in _SIZES if n <= self.max_batch]
            reaches = [n for n in (_PAD, 2 * _PAD) if n <= self.n_cells]
            self._ahead = [self._shape(n, n, reach) for reach in reaches for n in sizes if n <= 32]
            self._ahead += [self._shape(n, 1, reach) for reach in reaches for n in sizes]
            self._ahead = [dataclasses.replace(shape, scales=scales) for shape in self._ahead]
            return
        sizes = [n for n in (*range(12, 33, 4), *range(40, 257, 8), *range(288, 513, 32)) if n <= self.max_batch]
        few = [n for n in batch_sizes if n <= 8]
        self._ahead = [self._shape(n, 1, 1) for n in sizes]
        self._ahead += [self._shape(n, n, _REACH + 1) for n in few] + [self._shape(n, 1, _REACH + 1) for n in sizes]
        self._ahead = [dataclasses.replace(shape, scales=scales) for shape in self._ahead]

    def _prepare(self, shape: BatchShape) -> None:
        for part in self._parts(shape):
            self.devices[part.device].prepare(part.graph)

    def prepare_ahead(self) -> bool:
        """Gets one more shape ready that requests are likely to need."""
        while self._ahead:
            shape = self._ahead.pop(0)
            if shape in self._graphs:
                continue
            if self.placement is None:
                self._prepare(shape)
            else:
                self._rehearse(shape)
            return True
        return False

    def _rehearse(self, shape: BatchShape) -> None:
        """Runs a batch of nothing but filling, so that devices elsewhere have its programs."""
        nothing = np.empty(0, np.int64)
        with suppress(DeviceLost):
            self._begin(shape, nothing, nothing, nothing, nothing, nothing).result()

    def start(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        starts: NDArray[np.int64],
        outputs: NDArray[np.int32],
        ends: NDArray[np.int64] | None = None,
        *,
        scales: Scales = (),
    ) -> Future[NDArray[np.float32]]:
        """See Forward. `ends`: the last cell each token sees, where that is not its own."""
        n, n_out = len(tokens), len(outputs)
        if not 0 < n <= self.max_batch:
            raise ForwardError(f"a batch of {n} tokens; the device takes 1 to {self.max_batch}")
        cells = starts + positions
        used = int(cells.max()) + 1
        if used > self.n_cells or int(starts.min()) < 0 or int(positions.min()) < 0:
            raise ForwardError(f"a token at KV cell {used - 1} of a cache of {self.n_cells}")
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.n_vocab:
            raise ForwardError(f"a token outside the vocabulary of {self.n_vocab}")
        if n_out and (n_out > n or int(outputs.min()) < 0 or int(outputs.max()) >= n):
            raise ForwardError(f"an output that is no row of a batch of {n}")
        if self._lost is not None:
            raise self._lost
        if ends is not None:
            used = int(ends.max()) + 1
            if used > self.n_cells or bool((ends < cells).any()):
                raise ForwardError(f"a token that sees up to KV cell {used - 1} of a cache of {self.n_cells}")
        return self._begin(self._shape(n, n_out, used, scales), tokens, positions, starts, cells, outputs, ends)

    def _begin(
        self,
        shape: BatchShape,
        tokens: NDArray[np.integer],
        positions: NDArray[np.integer],
        starts: NDArray[np.int64],
        cells: NDArray[np.int64],
        outputs: NDArray[np.integer],
        ends: NDArray[np.int64] | None = None,
    ) -> Future[NDArray[np.float32]]:
        """Starts a batch of a shape, filled up as needed."""
        n, n_out = len(tokens), len(outputs)
        filling = shape.n_tokens - n
        inputs: dict[str, Bytes] = {
            "tokens": _filled(tokens, np.int32, filling, 0),
            "positions": _filled(positions, np.int32, filling, 0),
            "cells": _filled(cells, np.int64, filling, self.n_cells),
            "out_rows": _filled(outputs, np.int32, shape.n_outputs - n_out, 0),
            "mask": _mask(starts, cells if ends is None else ends, shape),
        }
        if self._n_swa:
            inputs["mask_swa"] = _mask(np.maximum(starts, cells - self._n_swa + 1), cells, shape)
        job = _Job(self._parts(shape), inputs, n, 4 * n_out * self.width)
        if len(job.parts) == 1 and self._here(0):
            self._run(job, 0)
        else:
            self._flying.add(job.future)
            job.future.add_done_callback(self._landed)
            self._go_on(job, 0)
        return job.future

    def _run(self, job: _Job, index: int) -> None:
        """One part of a batch on its device; what it gives is read, and the next part follows."""
        part = job.parts[index]
        device = self.devices[part.device]
        for name, tensor in part.graph.inputs.items():
            device.write(tensor, job.inputs[name])
        for name, tensor in part.takes.items():
            device.write(tensor, job.values[name])
        device.submit(part.graph)
        wanted = [(name, tensor, tensor.nbytes) for name, tensor in part.gives.items()]
        logits = part.graph.outputs.get(self.output.value)
        if logits is not None:
            wanted.append(("logits", logits, job.n_logits))
        elif not wanted:  # a chunk that only fills the cache: any byte says that it is done
            name, tensor = next(iter(part.graph.inputs.items()))
            wanted.append(("", tensor, 4))
        left = len(wanted)
        lock = threading.Lock()

        def arrived(name: str, future: Future[Bytes]) -> None:
            nonlocal left
            try:
                data = future.result()
                # what lies in this machine's working memory is gone with the next batch
                job.values[name] = data if len(job.parts) == 1 or not self._here(part.device) else data.copy()
            except BaseException as error:
                self._fail(job, error)
                return
            with lock:
                left -= 1
                last = not left
            if last:
                self._go_on(job, index + 1)

        for name, tensor, size in wanted:
            future = device.read(tensor, 0, size)
            future.add_done_callback(lambda f, name=name: arrived(name, f))  # type: ignore[misc]

    def _go_on(self, job: _Job, index: int) -> None:
        """Hands a batch to the device of its next part, or to whoever waits for it."""
        if index < len(job.parts):
            self._queues[job.parts[index].device].put((job, index))
            return
        logits = job.values.get("logits", np.empty(0, np.uint8)).view(np.float32)
        if job.n_logits and 8 * self.width * job.n_tokens <= 3 * job.n_logits:  # mostly of generating slots
            self._depth.note(job.n_logits // (4 * self.width), time.perf_counter(), self._full())
        with suppress(Exception):  # it failed meanwhile
            job.future.set_result(logits.reshape(-1, self.width))

    def _full(self) -> bool:
        """Whether as many batches as are allowed are on their way; the one that just ended counts."""
        return len(self._flying) >= self._depth.value

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
        if isinstance(error, DeviceLost):
            self._look_for_lost()
        with suppress(Exception):
            job.future.set_exception(error)

    def _landed(self, future: Future[NDArray[np.float32]]) -> None:
        self._flying.discard(future)

    def profile(self, n: int, start: int = 0) -> list[OperationTime]:
        """Times of each operation for `n` tokens of one sequence from position `start` on, the last with logits.

        Raises ForwardError unless the whole model is on this machine.
        """
        device = self.devices[0]
        if self.placement is not None or not isinstance(device, CpuDevice):
            raise ForwardError("operations can be timed only where the whole model is on this machine")
        positions = np.arange(start, start + n, dtype=np.int32)
        self.start(np.zeros(n, np.int32), positions, np.zeros(n, np.int64), np.array([n - 1], np.int32)).result()
        return device.profile(self._parts(self._shape(n, 1, start + n))[0].graph)

    def _shape(self, n: int, n_out: int, used: int, scales: Scales = ()) -> BatchShape:
        """The shape that serves a batch: a few sizes, so that graphs are found again."""
        if self.placement is not None:
            n_tokens = min(next(size for size in _SIZES if size >= n), self.max_batch)
            n_outputs = n_out if n_out <= 1 else n_tokens if n_tokens <= 64 or 2 * n_out > n else min(64, n_tokens)
            reach = max(_PAD, 1 << (used - 1).bit_length())  # masks are sent, too
            return BatchShape(n_tokens, max(n_out, n_outputs), min(reach, self.n_cells), self.output, scales)
        step = 1 if n <= 8 else 4 if n <= 32 else 8 if n <= 256 else 32
        n_tokens = min(-(-n // step) * step, self.max_batch)
        n_outputs = n_out if n_out <= 2 or n <= 8 else min(n_tokens, 1 << (n_out - 1).bit_length())
        reach = _REACH if used <= _REACH else max(8 * _REACH, 1 << (used - 1).bit_length())
        return BatchShape(n_tokens, n_outputs, min(reach, self.n_cells), self.output, scales)

    def copy_cells(self, src: int, dst: int, n: int) -> None:
        """Copies n cells of all layers from `src` to `dst`; the ranges may overlap."""
        if min(src, dst, n) < 0 or max(src, dst) + n > self.n_cells:
            raise ForwardError(f"copy of {n} KV cells from {src} to {dst} of {self.n_cells}")
        self._see_through()
        for (name, device), cache in self._own.items():
            if name in self._caches:
                self.devices[device].copy(_cells(cache, src, n), _cells(cache, dst, n))

    def _see_through(self) -> list[Future[NDArray[np.float32]]]:
        """Waits for the batches on their way, which still mean the cells as they are; those that were."""
        flying = list(self._flying)
        wait(flying)
        if self._lost is not None:  # those were given up, and what is left of them may still be computed
            raise self._lost
        return flying

    def cell_kind(self, scales: Scales = ()) -> CellKind:
        """See Forward."""
        kind = self._kinds.get(scales)
        if kind is None:
            model = fingerprint(self.file, self.model, scales)
            kind = CellKind(model, self._type_k, self._type_v, self._rows, scales)
            if len(self._kinds) < _KINDS_KEPT:
                self._kinds[scales] = kind
        return kind

    def _cell_places(self, start: int, n: int) -> Iterable[tuple[Device, Tensor, int, int]]:
        """Where `n` cells lie, in the order of Cells: device, cache, offset, bytes."""
        if min(start, n) < 0 or start + n > self.n_cells:
            raise ForwardError(f"{n} KV cells from {start} of {self.n_cells}")
        for layer, pair in enumerate(zip(self._kv.k, self._kv.v, strict=True)):
            device = 0 if self.placement is None else self.placement.layers[layer]
            for cache in pair:
                row = cache.nb[1]
                yield self.devices[device], self._own[cache.name, device], start * row, n * row

    def read_cells(self, start: int, n: int) -> Cells:
        """See Forward."""
        for batch in self._see_through():
            batch.result()
        # All are asked for before the first is waited for: on a link that takes one round trip.
        reads = [(device.read(cache, at, size), size) for device, cache, at, size in self._cell_places(start, n)]
        cells = np.empty(n * self.cell_bytes, np.uint8)
        at = 0
        for future, size in reads:
            cells[at : at + size] = future.result()
            at += size
        return cells

    def write_cells(self, start: int, n: int, cells: Cells) -> None:
        """See Forward."""
        held = cells.size // self.cell_bytes
        if held * self.cell_bytes != cells.size or n > held:
            raise ForwardError(f"{cells.size} bytes for {n} KV cells of {self.cell_bytes}")
        self._see_through()
        at = 0
        for device, cache, offset, size in self._cell_places(start, n):
            device.write(cache, cells[at : at + size], offset)
            at += held * cache.nb[1]

    def sound_cells(self, cells: Cells, n: int) -> bool:
        """See Forward."""
        if cells.size != n * self.cell_bytes:
            return False
        at = 0
        for rows in self._rows:
            for type, row in zip((self._type_k, self._type_v), rows, strict=True):
                if not _sound(cells[at : at + n * row], type):
                    return False
                at += n * row
        return True

    # -- devices that die --------------------------------------------------------------------------------------------

    def _guard(self, device: Device) -> None:
        """Has us told when a device is lost, where it is of the kind that can be."""
        on_lost = getattr(device, "on_lost", None)
        if on_lost is not None:
            on_lost(lambda _: self._look_for_lost())

    def _look_for_lost(self) -> None:
        """Whoever waits for a batch need not wait for the parts of it that are still computed elsewhere."""
        error = next((loss for i in self._used if (loss := _loss(self.devices[i])) is not None), None)
        if self._lost is None and error is not None:
            self._lost, self._lost_since = error, time.time()
            for future in list(self._flying):
                with suppress(Exception):  # it came to its end meanwhile
                    future.set_exception(error)
            self._watcher()

    def watch(self, callback: Callable[[], None]) -> None:
        """See Forward."""
        self._watcher = callback

    def lost(self) -> DeviceLost | None:
        """See Forward."""
        return self._lost

    def restore(self, elsewhere: bool) -> None:
        """See Forward."""
        self._stand_still()
        before = self.placement, self._used, self._lost
        away = self._bring_back(elsewhere)
        try:
            if away:
                placement = self.placement
                if not elsewhere or self._replace is None or placement is None:
                    raise _together([*away.values()])
                self.placement = self._replace(placement, self._alive())
                log.warning("%s; its layers go to the devices that are left", _together([*away.values()]))
            self._lost = None
            self._settle()
            self._look_for_lost()  # one that died while another was brought back
            if self._lost is not None:
                raise self._lost
        except BaseException as error:
            self.placement, self._used, self._lost = before
            if isinstance(error, DeviceLost):
                self._lost = error
            raise
        gone = {n: Away(loss.device, loss.why, self._lost_since, "", {}) for n, loss in away.items()}
        self._away = gone | self._away
        self._tell_what_is_where()

    def _alive(self) -> list[int]:
        return [i for i, device in enumerate(self.devices) if _loss(device) is None]

    def _tell_what_is_where(self) -> None:
        if self.placement is None or self._first is None or not self._away:
            return
        first, now = held(self._first), held(self.placement)
        names = {self.devices[number].name: text for number, text in now.items()}
        self._away = {
            number: away._replace(layers=first.get(number, "nothing"), now=names) for number, away in self._away.items()
        }
        for name, text in names.items():
            log.info("%s: %s", name, text)

    def away(self) -> Sequence[Away]:
        """See Forward."""
        return tuple(self._away.values())

    def call_back(self) -> None:
        """See Forward."""
        gone: list[DeviceLost] = []
        for number in list(self._away):
            if number in self._back or _loss(self.devices[number]) is None:
                continue
            self._calling.add(number)
            found: Device | None = None
            try:
                if self._reconnect is None:
                    raise DeviceLost(self.devices[number].name, "it was not to be connected again")
                found = self._reconnect(self.devices[number])
                self._back[number] = found, self._send_ahead(number, found)
            except BaseException as error:
                self._calling.discard(number)
                if found is not None:
                    found.close()
                if not isinstance(error, DeviceLost):
                    raise
                gone.append(error)
            if self._closed:
                self._let_go()
                return
        if len(gone) == len(self._away):
            raise _together(gone)

    def _send_ahead(self, number: int, device: Device) -> dict[tuple[str, int], Tensor]:
        """Gives a device that takes no part yet the weights that are its own; them, by name and device."""
        assert self._first is not None
        own: dict[tuple[str, int], Tensor] = {}
        for shape in self._largest():
            self._divide(shape, self._first, own)
        weights = {key: t for key, t in own.items() if key[1] == number and key[0] not in self._caches}
        device.load([(tensor, self._bytes(tensor.name)) for tensor in weights.values()])
        return weights

    def _let_go(self) -> None:
        """Closes devices that came back and are not needed any more."""
        while self._back:
            self._back.popitem()[1][0].close()

    def move_back(self) -> None:
        """See Forward."""
        self._stand_still()
        before = self.placement, self._used
        while self._back:
            number, (device, weights) = self._back.popitem()
            self._forget_device(number)
            self.devices[number] = device
            self._guard(device)
            self._own |= weights
            self._held |= set(weights)
            self._calling.discard(number)
            if _loss(device) is not None:
                self._forget_device(number)
        alive = self._alive()
        try:
            whole = self._first is None or set(self._first.devices) <= set(alive)
            if not whole and self._replace is not None and self._first is not None:
                self.placement = self._replace(self._first, alive)
            else:
                self.placement = self._first
            self._settle()
            self._look_for_lost()
            if self._lost is not None:
                raise self._lost
        except BaseException as error:
            self.placement, self._used = before
            self._lost = None
            for number in range(len(self.devices)):
                if number not in self._used and _loss(self.devices[number]) is not None:
                    self._forget_device(number)
            self._look_for_lost()
            if self._lost is None:
                self._settle()
            elif isinstance(error, DeviceLost):
                self._lost = error
            raise
        for number in sorted(set(self._away) & set(alive)):
            log.warning("%s is there again, and has its layers back", self.devices[number].name)
        self._away = {number: away for number, away in self._away.items() if number not in alive}
        self._tell_what_is_where()

    def _forget_device(self, number: int) -> None:
        """Whatever it held is gone."""
        self.devices[number].close()
        self._own = {key: tensor for key, tensor in self._own.items() if key[1] != number}
        self._held = {key for key in self._held if key[1] != number}
        self._fixed = {key: tensor for key, tensor in self._fixed.items() if key[1] != number}

    def _bring_back(self, elsewhere: bool) -> dict[int, DeviceLost]:
        """Connects lost devices again; by number those of which a part is needed and that are still gone.

        One of which nothing is needed is only looked for when layers may have to go there.
        """
        away: dict[int, DeviceLost] = {}
        for number, device in enumerate(self.devices):
            if _loss(device) is None or not (number in self._used or elsewhere) or number in self._calling:
                continue
            self._forget_device(number)
            try:
                if self._reconnect is None:
                    raise DeviceLost(device.name, "it was not to be connected again")
                found = self._reconnect(device)
                if self._closed:
                    found.close()
                    raise DeviceLost(device.name, "it is not needed any more")
                self.devices[number] = found
                self._guard(found)
            except DeviceLost as error:
                if number in self._used:
                    away[number] = error
        return away

    def _stand_still(self) -> None:
        """Returns when no thread works on a batch any more, not even on one that nobody waits for."""
        wait(list(self._flying))
        reached = []
        for jobs in self._queues.values():
            reached.append(threading.Event())
            jobs.put(reached[-1])
        for event in reached:
            while not event.wait(0.1):
                if self._closed:
                    raise ForwardError("the model is being closed")

    def close(self) -> None:
        """Ends the threads and lets go of the memory."""
        self._closed = True
        for jobs in self._queues.values():
            jobs.put(None)
        self._watcher = lambda: None
        self._let_go()
        for device in self.devices:
            device.close()
        for end in self._watches:
            end()


def _owned(own: dict[tuple[str, int], Tensor], leaf: Tensor, device: int) -> Tensor:
    """A weight or cache as a device has it, made when a part first needs it; it has no memory yet."""
    key = leaf.name, device
    if key not in own:
        own[key] = Tensor(leaf.type, leaf.ne, leaf.nb, name=leaf.name)
    return own[key]


def _loss(device: Device) -> DeviceLost | None:
    """Why a device is gone; None while it is there, or where it is of a kind that stays."""
    lost: DeviceLost | None = getattr(device, "lost", None)
    return lost


def _together(errors: Sequence[DeviceLost]) -> DeviceLost:
    """One loss that names all devices."""
    if len(errors) == 1:
        return errors[0]
    whys = dict.fromkeys(error.why for error in errors)
    return DeviceLost(" and ".join(error.device for error in errors), "; ".join(whys))


def _fixed(part: Part) -> Iterable[tuple[str, Tensor]]:
    """What a part is given and what it gives, by name."""
    return (*part.graph.inputs.items(), *part.takes.items(), *part.graph.outputs.items())


def _filled(values: NDArray[np.integer], type: type[np.integer], filling: int, filler: int) -> Bytes:
    """The bytes of `values` and of `filling` times `filler`, as integers of a type."""
    whole = np.full(len(values) + filling, filler, type)
    whole[: len(values)] = values
    return whole.view(np.uint8)


def _mask(first: NDArray[np.int64], last: NDArray[np.int64], shape: BatchShape) -> Bytes:
    """The bytes of f16[n_tokens, n_kv]: 0 from cell `first` to cell `last` of a token, minus infinity elsewhere."""
    mask = np.full((shape.n_tokens, shape.n_kv), _HIDDEN, np.uint16)
    for row, start, stop in zip(mask, first.tolist(), last.tolist(), strict=False):
        row[start : stop + 1] = 0
    return mask.reshape(-1).view(np.uint8)


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


def _cells(cache: Tensor, start: int, n: int) -> Tensor:
    """The rows of `n` cells of a cache."""
    row = cache.nb[1]
    return Tensor(
        cache.type, (cache.ne[0], n, 1, 1), (cache.nb[0], row, n * row, n * row), view_src=cache, view_offs=start * row
    )
