"""The tensors of a model on their devices: weights, caches, inputs, and results that cross from device to device.

Weights on this machine stay in the file's mapping; other devices get theirs once. Inputs, caches and crossing results
have fixed places, so that a graph built once per shape is run again with new contents.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from llamado.devices.device import (
    Buffer,
    Bytes,
    Device,
    DeviceError,
    DeviceFull,
    DeviceLost,
    LoadProgress,
    is_accelerator,
)
from llamado.devices.split.partition import GraphPart, split
from llamado.devices.split.placement import mib
from llamado.engine.forward.options import RunnerOptions
from llamado.ggml.ops import Op
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models.base import Model
from llamado.models.batch import BatchShape
from llamado.models.inputs import ForwardGraph, Input
from llamado.models.memory import Memory

if TYPE_CHECKING:
    from llamado.devices.split.placement import Placement
    from llamado.models.adapter import Adapter
    from llamado.models.control import ControlVector

Progress = Callable[[str, int, int], None]

GROUP = 64 << 20
"""Bytes of adjacent layers that share an allocation on remote devices: it is kept while one of them is needed."""

_SPARE = 1.1
"""Memory of an accelerator that was full, in parts of what it needs, before its layers come back."""

Own = dict[tuple[str, int], Tensor]
"""Tensors by name and device number."""


class CutGraph(NamedTuple):
    """A graph in parts, each for one device, and the inputs that fill it."""

    parts: list[GraphPart]
    feeds: Sequence[Input]


class DeviceOutOfMemory(DeviceFull):
    """A device has no memory for its part; `number` is that of the device."""

    def __init__(self, number: int, error: DeviceFull) -> None:
        super().__init__(str(error))
        self.number = number


class DeviceTensors:
    """The tensors of `model` (read from `file`) on `devices`, by `placement` (None: all on the first device, which must
    be this machine's).

    `used`: the devices that have a part in batches.
    """

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        memory: Memory,
        devices: list[Device],
        placement: Placement | None,
        options: RunnerOptions,
    ) -> None:
        self.placement = placement
        self.used: list[int] = []
        self._file, self._model, self._memory = file, model, memory
        self._devices = devices
        self._mlock = options.mlock
        self._observer = options.observer
        self._weights = set(model.weights.values())
        self._roles = dict(model.roles)
        self._added: dict[str, Adapter | ControlVector] = {}  # tensor name → adapter or control vector it is from
        for adapter in model.adapters:
            self._weights.update(adapter.tensors)
            for weight, pair in adapter.pairs.items():
                self._added |= {tensor.name: adapter for tensor in pair}
                self._roles |= {tensor.name: model.roles[weight] for tensor in pair}  # they are placed with the weight
        if model.control is not None:
            self._weights.update(model.control.tensors)
            self._added |= dict.fromkeys(model.control.roles, model.control)
            self._roles |= model.control.roles
        self._caches = memory.layer_of
        self._own: Own = {}  # weights and caches
        self._held: set[tuple[str, int]] = set()  # those with memory and contents
        self._fixed: Own = {}  # memory of inputs and crossing results

    @property
    def in_place(self) -> bool:
        """True if one device of this process runs all batches, each as one part."""
        return len(self.used) == 1 and self._devices[self.used[0]].local

    # -- graphs ------------------------------------------------------------------------------------------------------

    def cut(self, shape: BatchShape) -> CutGraph:
        """Return the graph for a shape, in parts, on the present tensors."""
        graph = self._model.build(shape, self._memory)
        if self._observer is not None:
            self._observer.add(graph)
        graph.compact()
        if self.placement is None:
            return CutGraph([GraphPart(0, graph)], graph.feeds)
        return CutGraph(self._divide(graph, self.placement, self._own), graph.feeds)

    def bind(self, parts: Sequence[GraphPart]) -> None:
        """Bind the inputs and results of parts to their fixed places."""
        for part in parts:
            for name, tensor in _fixed(part):
                place = self._fixed[name, part.device]
                tensor.buffer, tensor.offset = place.buffer, place.offset

    def _divide(self, graph: ForwardGraph, placement: Placement, own: Own) -> list[GraphPart]:
        """Divide a graph; weights and caches that are new on their device are added to `own`."""
        return split(graph, partial(self._home, placement), partial(_owned, own), 0)

    def _home(self, placement: Placement, leaf: Tensor, node: Tensor) -> int | None:
        """Return the device of a weight or of a layer's cache; see `split`."""
        if leaf.name in self._caches:
            return placement.cache_of(self._caches[leaf.name])
        roles = self._roles.get(leaf.name)
        if roles is None:
            return None
        if placement.cache is not None and any(s is not None and s.root()[0].name in self._caches for s in node.src):
            return placement.cache  # an operation on the cache finds its small weights there, such as attention sinks
        return placement.home(roles, rows=node.op is Op.GET_ROWS)

    def given(self, name: str) -> tuple[int, Tensor]:
        """Return the device of an output, and its place there."""
        return next((device, tensor) for (key, device), tensor in self._fixed.items() if key == name)

    # -- memory ------------------------------------------------------------------------------------------------------

    def settle(self, shapes: Sequence[BatchShape], progress: Progress | None = None) -> list[GraphPart]:
        """Allocate everything that graphs of these shapes need, and load weights, as far as that is not done yet.
        Return the parts of the first shape.

        `shapes` are those that need all memory. After a failure the completed work need not be done again.
        """
        if self.placement is None:
            self._own = {(t.name, 0): t for t in (*self._weights, *self._memory.tensors)}
        else:
            self._own = {key: tensor for key, tensor in self._own.items() if key in self._held}
        cuts = [self.cut(shape) for shape in shapes]
        everything = [part for cut in cuts for part in cut.parts]
        self.used = sorted({part.device for part in everything})
        self._check(everything)
        fixed = self._new_places(everything)
        weights: dict[int, list[Tensor]] = {device: [] for device in self.used}
        caches: dict[int, list[Tensor]] = {device: [] for device in self.used}
        for (name, device), tensor in self._own.items():
            if (name, device) not in self._held:
                (caches if name in self._caches else weights)[device].append(tensor)
        for device in self.used:
            # tensors that are released together share an allocation: see `shed`
            to = self._devices[device]
            with _named(device):
                if fixed[device]:
                    to.place([*fixed[device].values()])
                    self._fixed |= fixed[device]
                for group in self._groups(to, caches[device]):
                    to.place(group)
                    self._held.update((tensor.name, device) for tensor in group)
        self._load(weights, progress)
        return cuts[0].parts

    def _check(self, parts: Iterable[GraphPart]) -> None:
        """Raise `DeviceError` before anything is sent, if a device does not support its part."""
        nodes = [(part.device, node) for part in parts for node in part.graph.nodes if not node.is_noop]
        for number, op, type in sorted({(device, node.op, _source(node).type) for device, node in nodes}):
            device = self._devices[number]
            if not device.supports(op, type):
                raise DeviceError(f"{device.name} cannot run this model: it has no {op.name} for {type.name}")

    def _new_places(self, parts: Iterable[GraphPart]) -> dict[int, Own]:
        """Return for each device new places for inputs and results that have none yet, or too small a one."""
        fixed: dict[int, Own] = {device: {} for device in self.used}
        for part in parts:
            for name, tensor in _fixed(part):
                key = name, part.device
                place = fixed[part.device].get(key) or self._fixed.get(key)
                if place is None or place.nbytes < tensor.nbytes:
                    n = -(-tensor.nbytes // 4)
                    place = Tensor(TensorType.F32, (n, 1, 1, 1), (4, 4 * n, 4 * n, 4 * n), name=name)
                    fixed[part.device][key] = place
        return fixed

    def _load(self, weights: Mapping[int, list[Tensor]], progress: Progress | None) -> None:
        """Load weights to all devices at the same time."""
        lacking = [device for device, tensors in weights.items() if tensors]
        total = sum(t.nbytes for d in lacking for t in weights[d] if not self._devices[d].local)
        done, lock = 0, threading.Lock()

        def load(device: int) -> None:
            def count(n: int) -> None:
                nonlocal done
                with lock:
                    done += n
                    if progress is not None:
                        verb = "copying" if to.endpoint is None else "sending"
                        progress(f"{verb} weights to {to.name}", done, total)

            to = self._devices[device]
            with _named(device):
                buffers = self._load_weights(to, weights[device], None if to.local else count)
            if self._mlock:
                all(buffer.lock() for buffer in buffers)  # the first refusal logs a warning
            self._held.update((tensor.name, device) for tensor in weights[device])

        if len(lacking) < 2:
            for device in lacking:
                load(device)
            return
        with ThreadPoolExecutor(len(lacking), "llamado-load") as pool:
            for _ in pool.map(load, lacking):
                pass

    def _load_weights(
        self, device: Device, weights: Sequence[Tensor], progress: LoadProgress | None = None
    ) -> list[Buffer]:
        """Load weights on a device, all or none, in pieces that can be released separately."""
        buffers: list[Buffer] = []
        try:
            if not device.local:
                device.announce_weights([(tensor, self._bytes(tensor.name)) for tensor in weights])
            for group in self._groups(device, weights):
                buffers += device.load([(tensor, self._bytes(tensor.name)) for tensor in group], progress)
        except BaseException:
            for buffer in buffers:
                buffer.free()
            raise
        return buffers

    def _groups(self, device: Device, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Group weights or caches in allocations of adjacent layers of about `GROUP` bytes."""
        if device.local or not tensors:  # local weights stay in the file's mapping
            return [[*tensors]] if tensors else []

        def layer(tensor: Tensor) -> int:
            roles = self._roles.get(tensor.name)
            return self._caches.get(tensor.name, roles[0].layer if roles else -1)

        groups: list[list[Tensor]] = [[]]
        size, last = 0, layer(tensors[0])
        for tensor in sorted(tensors, key=layer):
            if size >= GROUP and layer(tensor) != last:
                groups.append([])
                size = 0
            groups[-1].append(tensor)
            size, last = size + tensor.nbytes, layer(tensor)
        return groups

    def _bytes(self, name: str) -> Bytes:
        if name in self._added:
            return self._added[name].data(name)
        file = self._model.borrowed_files.get(name, self._file)
        info = file.tensors[name]
        return file.shard_data(info.shard)[info.offset : info.offset + info.nbytes]

    # -- caches ------------------------------------------------------------------------------------------------------

    def cache(self, name: str) -> tuple[Device, Tensor]:
        """Return a tensor of the memory, and its device."""
        device = 0 if self.placement is None else self.placement.cache_of(self._caches[name])
        return self._devices[device], self._own[name, device]

    # -- joining and leaving devices -----------------------------------------------------------------------------------

    def send_ahead(
        self, number: int, device: Device, placement: Placement, shapes: Sequence[BatchShape], *, anew: bool = True
    ) -> Own:
        """Send a device the weights of device `number` in `placement`; return them. Unless `anew`, it has a part
        already and gets the missing weights.
        """
        own: Own = {}
        for shape in shapes:
            self._divide(self._model.build(shape, self._memory), placement, own)
        weights = {
            key: tensor
            for key, tensor in own.items()
            if key[1] == number and key[0] not in self._caches and (anew or key not in self._held)
        }
        if anew and is_accelerator(device):
            needed = int(_SPARE * sum(tensor.nbytes for key, tensor in own.items() if key[1] == number))
            if needed > (free := device.memory()[0]):
                raise DeviceLost(device.name, f"it has {mib(free)} of memory free, its part takes {mib(needed)}")
        self._load_weights(device, [*weights.values()])
        return weights

    def shed(self, shapes: Sequence[BatchShape]) -> None:
        """Release memory that has nothing of the present placement."""
        if self.placement is None:
            return
        needed: Own = {}
        for shape in shapes:
            self._divide(self._model.build(shape, self._memory), self.placement, needed)
        for number, device in enumerate(self._devices):
            if device.local:
                continue
            own = {key: tensor for key, tensor in self._own.items() if key[1] == number and key in self._held}
            kept = {id(tensor.buffer) for key, tensor in own.items() if key in needed}
            gone = {key: tensor for key, tensor in own.items() if id(tensor.buffer) not in kept}
            for buffer in {id(tensor.buffer): tensor.buffer for tensor in gone.values()}.values():
                cast(Buffer, buffer).free()
            self._held -= set(gone)
            self._own = {key: tensor for key, tensor in self._own.items() if key not in gone}

    def adopt(self, weights: Own) -> None:
        """Register weights that were sent ahead as those of a device."""
        self._own |= weights
        self._held |= set(weights)

    def forget(self, number: int) -> None:
        """Drop everything of a lost device."""
        self._own = {key: tensor for key, tensor in self._own.items() if key[1] != number}
        self._held = {key for key in self._held if key[1] != number}
        self._fixed = {key: tensor for key, tensor in self._fixed.items() if key[1] != number}


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Add the number of the device to an error for lack of memory."""
    try:
        yield
    except DeviceFull as error:
        raise DeviceOutOfMemory(number, error) from error


def _owned(own: Own, leaf: Tensor, device: int) -> Tensor:
    """Return a weight or cache on a device; a new one has no memory yet."""
    key = leaf.name, device
    if key not in own:
        own[key] = Tensor(leaf.type, leaf.ne, leaf.nb, name=leaf.name)
    return own[key]


def _source(node: Tensor) -> Tensor:
    """Return the first operand of an operation."""
    return node.source(0) or node


def _fixed(part: GraphPart) -> Iterable[tuple[str, Tensor]]:
    """Return the inputs and results of a part, by name."""
    return (*part.graph.inputs.items(), *part.takes.items(), *part.graph.outputs.items())
