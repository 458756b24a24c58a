"""The devices a model is divided among, and its placement on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from llamado.devices.accelerators import LocalDevices
from llamado.devices.device import Device, WorkerLost
from llamado.devices.registry import Unreachable, backend
from llamado.devices.split.explain import holdings, idle, shares_text
from llamado.devices.split.failover import replace_lost
from llamado.devices.split.measure import figures_of, measure, measure_all
from llamado.devices.split.placement import (
    DeviceFigures,
    Placement,
    SplitOptions,
)
from llamado.devices.split.rules import place
from llamado.devices.split.shares import accelerators
from llamado.devices.split.support import lacking
from llamado.engine.forward.fitting import MemoryRequest, before_reading, fit
from llamado.engine.forward.sizes import usual_weights
from llamado.engine.options import Report
from llamado.ggml.ops import Op
from llamado.ggml.role import ModelPart
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.models.base import Model
from llamado.models.batch import BatchShape, Output

log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds for a lost worker to respond, in each attempt to reconnect."""
_LEAST_PATIENCE = 0.5
_TRIAL_TOKENS, _TRIAL_CELLS = 8, 256
"""Sizes of the graphs whose operations accelerators are asked for."""


class ReachedDevice(NamedTuple):
    """A device of a worker that is about to join, and its figures."""

    device: Device
    figures: DeviceFigures


class DevicePool:
    """The CPU (device 0), accelerators of this machine and the workers of `split`: connected, measured if necessary,
    with a placement.

    `fit`: the context and the placement for `wanted`. `figures`: of all devices, from before the model was loaded;
    `left`: the numbers of workers that were removed. Raises WorkersUnreachable, NotEnoughMemory (before a byte is
    sent), UnknownDevice.
    """

    def __init__(
        self,
        split: SplitOptions,
        local: LocalDevices,
        file: GGUFFile,
        model: Model,
        wanted: MemoryRequest,
        progress: Report | None = None,
    ) -> None:
        # an unresponsive worker must not use up the failover time
        self._patience = (
            _PATIENCE if split.failover is None else max(min(_PATIENCE, split.failover / 2), _LEAST_PATIENCE)
        )
        self._workers = backend("rpc", split.rpc, split.device_options(file.shard_paths))
        self._accelerators = local.accelerators
        here = [local.cpu, *local.accelerators.take()]
        self._n_here = len(here)

        def waiting(missing: Sequence[Unreachable]) -> None:
            if progress is not None:
                names = "; ".join(worker.why for worker in missing)
                progress(f"waiting for workers: {names}" if missing else "connecting to workers", 0, 0)

        until: float | None = None  # end of the wait for workers that are lost or do not answer meanwhile
        self.devices: list[Device] = here
        while True:
            try:
                self.devices = [*here, *self._workers.devices(split.wait, waiting)]
            except BaseException:
                _close(here[1:])
                raise
            until = time.monotonic() + split.wait if until is None else until
            self._workers.expect_answers(max(split.wait, split.connect_timeout) if split.wait else None)
            try:
                measure = split.tensor_split is None and split.networked
                figures = _measured(self.devices, file, model, wanted, measure=measure)
                self.figures = without(figures, local.reserved)
                self.fit = fit(file, model, wanted, self.figures, split)
                self._workers.expect_answers(None)
                break
            except BaseException as error:
                _close(self.devices[self._n_here :])
                if not isinstance(error, WorkerLost) or time.monotonic() >= until:
                    _close(here[1:])
                    raise
                log.warning("%s; waiting for it", error.as_logged())
        self.left: set[int] = set()
        self.by_hand: Placement | None = None
        """The layout that a client requested, in place of the options."""
        self._tried: set[str] = set()  # names of devices that `measure` has tried
        self.split, self._trial = split, usual_weights(file, model)
        given, n = split.tensor_split, len(self.devices) - self._n_here
        self._shares = [] if given is None else [*given[:n], *(0.0 for _ in range(n - len(given)))]
        self._shares_here = () if not given else given[n:]
        if text := shares_text(self.figures, split):
            log.info("%s", text)

    # -- placement -----------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        """The numbers of all member devices, alive or not."""
        return [number for number in range(len(self.figures)) if number not in self.left]

    def plan(self, members: Sequence[int]) -> Placement:
        """Return the placement that the user's options request on these devices. Raises NotEnoughMemory."""
        return place(self.fit.sizes, self.figures, self._options, members)

    def idle(self, placement: Placement) -> dict[int, str]:
        """Return the reasons why workers and accelerators have nothing, by device number."""
        if placement == self.by_hand:
            others = {number for number, known in enumerate(self.figures) if not known.local}
            found = dict.fromkeys(sorted(others - set(placement.devices)), "layers were laid out without it")
        else:
            found = idle(self.fit.sizes, self.figures, self._options, placement)
        return {number: why for number, why in found.items() if number not in self.left}

    def log_placement(self, placement: Placement) -> None:
        """Log a line for each device: what it holds and why, or why it holds nothing."""
        by_hand = "layers were laid out by hand" if placement == self.by_hand else ""
        for number, text in holdings(self.fit.sizes, self.figures, self._options, placement, by_hand).items():
            if number not in self.left:
                log.info("%s: %s", self.figures[number].name, text)
        for number, why in self.idle(placement).items():
            log.info("%s: gets no layers: %s", self.figures[number].name, why)

    @property
    def _options(self) -> SplitOptions:
        """The user's options, with the shares of workers that joined."""
        split = self.split
        if not split.tensor_split:
            return split
        return replace(split, tensor_split=(*self._shares, *self._shares_here))

    @property
    def unmeasured(self) -> list[int]:
        """The numbers of devices whose speed was not measured, or tried to be, yet."""
        return [n for n in self.members if self.figures[n].decode is None and self.figures[n].name not in self._tried]

    def measure(self, devices: Sequence[Device]) -> None:
        """Measure the unknown speeds of those of `devices` (by number) that are alive; nothing else may run on them
        meanwhile.
        """
        type, width = self._trial
        lacking = [n for n in self.unmeasured if devices[n].lost is None]
        found = measure_all([devices[n] for n in lacking], type=type, width=width)
        for number, figures in zip(lacking, found, strict=True):
            known = self.figures[number]
            self.figures[number] = replace(figures, name=known.name, free=known.free, total=known.total)
            self._tried.add(known.name)

    # -- members -------------------------------------------------------------------------------------------------------

    def reach(self, endpoint: str, speeds: Sequence[float | None]) -> list[ReachedDevice]:
        """Connect one more worker and measure its devices; if proportions are given, use the reported `speeds` instead.

        Changes nothing here. Raises a LlamadoError.
        """
        found = self._workers.open(endpoint)
        try:
            if self.split.tensor_split is None:
                type, width = self._trial
                return [ReachedDevice(device, measure(device, type=type, width=width)) for device in found]
            told = [*speeds, *(None for _ in found)]
            return [ReachedDevice(d, replace(figures_of(d), decode=told[i])) for i, d in enumerate(found)]
        except BaseException:
            for device in found:
                device.close()
            raise

    def add(self, endpoint: str, share: float, found: Sequence[ReachedDevice]) -> dict[int, Device]:
        """Take in the devices of a worker that was reached; return them by their places."""
        self._workers.add(endpoint, [reached.device for reached in found])
        added: dict[int, Device] = {}
        for device, known in found:
            number = min(self.left, default=len(self.figures))
            place = number - self._n_here
            device.name = f"RPC{place}[{device.endpoint}]"
            known = replace(known, name=device.name)
            if number in self.left:
                self.left.remove(number)
                self.figures[number] = known
                self._shares[place : place + 1] = [share] if self._shares else []
            else:
                self.figures.append(known)
                if self.split.tensor_split:
                    self._shares.append(share)
            added[number] = device
        return added

    def take_away(self, endpoint: str, numbers: Sequence[int]) -> None:
        """Remove a worker."""
        self._workers.remove(endpoint)
        self.left.update(numbers)

    def reconnect(self, lost: Device) -> Device:
        """Open a new device in place of a lost one; raises DeviceLost while that is impossible."""
        backend = self._accelerators if lost.endpoint is None else self._workers
        return backend.reconnect(lost, self._patience)

    def replace_lost(self, placement: Placement, alive: Sequence[int]) -> Placement:
        """Return the placement with the parts of other devices moved to these; raises NotEnoughMemory."""
        return replace_lost(self.fit.sizes, self.figures, placement, alive)


def _measured(
    devices: Sequence[Device], file: GGUFFile, model: Model, wanted: MemoryRequest, *, measure: bool
) -> list[DeviceFigures]:
    """Return the figures of devices before the model is loaded, with speeds if `measure`."""
    if measure:
        type, width = usual_weights(file, model)
        figures = measure_all(devices, type=type, width=width)
    else:
        figures = [figures_of(device) for device in devices]
    figures[0] = before_reading(figures[0], file)
    return with_lacks(devices, figures, model, wanted)


def without(figures: Sequence[DeviceFigures], reserved: int) -> list[DeviceFigures]:
    """Return the figures with `reserved` bytes of the accelerators' memory subtracted, from each in proportion to its
    free memory.
    """
    free = sum(device.free for device in figures if device.accelerator)
    found = list(figures)
    for number in accelerators(figures):
        left = figures[number].free * max(0, free - reserved) // free if free else 0
        found[number] = replace(figures[number], free=left)
    return found


def with_lacks(
    devices: Sequence[Device], figures: Sequence[DeviceFigures], model: Model, wanted: MemoryRequest
) -> list[DeviceFigures]:
    """Return the figures with the layers that accelerators cannot run. Workers report that when they get a graph."""
    if not accelerators(figures):
        return list(figures)
    options = wanted.runner_options(wanted.shape(_TRIAL_CELLS * wanted.n_slots)[1])
    memory = model.memory(options)
    output = Output.LOGITS if model.generates else Output.HIDDEN
    # a token and part of a prompt: some operations differ
    shapes = [
        BatchShape(
            n,
            n,
            _TRIAL_CELLS,
            output,
            scales=(1.0,) * len(model.adapters),
            n_seqs=int(memory.has_states),
            hidden_width=width,
        )
        for n in (1, min(_TRIAL_TOKENS, wanted.max_batch))
        for width in model.hidden_widths
    ]
    graphs = [model.build(shape, memory) for shape in shapes]
    n_layer = model.hparams.n_layer

    def item_of(leaf: Tensor, node: Tensor) -> int | None:
        if leaf.name in memory.layer_of:
            return memory.layer_of[leaf.name]
        is_rows = node.op is Op.GET_ROWS
        for role in model.roles.get(leaf.name, ()):
            if role.part is ModelPart.LAYER:
                return role.layer
            if role.part is ModelPart.OUTPUT and not is_rows:
                return n_layer
        return None

    found = list(figures)
    for number in accelerators(figures):
        lacks: dict[int, str] = {}
        for graph in graphs:
            lacks = lacking(graph, item_of, devices[number]) | lacks
        found[number] = replace(found[number], lacks=lacks)
    return found


def _close(devices: Iterable[Device]) -> None:
    for device in devices:
        device.close()
