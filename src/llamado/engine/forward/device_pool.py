"""The devices a model is divided among, and its placement on them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from llamado.devices.device import Device, DeviceLost
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
from llamado.engine.forward.fitting import MemoryRequest, before_reading, fit
from llamado.engine.forward.sizes import usual_weights
from llamado.engine.options import Report
from llamado.gguf.reader import GGUFFile
from llamado.models.base import Model

log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds for a lost worker to respond, in each attempt to reconnect."""
_LEAST_PATIENCE = 0.5


class ReachedDevice(NamedTuple):
    """A device of a worker that is about to join, and its figures."""

    device: Device
    figures: DeviceFigures


class DevicePool:
    """This machine (device 0) and the workers of `split`: connected, measured if necessary, with a placement.

    `fit`: the context and the placement for `wanted`. `figures`: of all devices, from before the model was loaded;
    `left`: the numbers of workers that were removed. Raises WorkersUnreachable, NotEnoughMemory (before a byte is
    sent), UnknownDevice.
    """

    def __init__(
        self,
        split: SplitOptions,
        here: Device,
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

        def waiting(missing: Sequence[Unreachable]) -> None:
            if progress is not None:
                names = "; ".join(worker.why for worker in missing)
                progress(f"waiting for workers: {names}" if missing else "connecting to workers", 0, 0)

        until: float | None = None  # end of the wait for workers that are lost or do not answer meanwhile
        while True:
            self.devices: list[Device] = [here, *self._workers.devices(split.wait, waiting)]
            until = time.monotonic() + split.wait if until is None else until
            self._workers.expect_answers(max(split.wait, split.connect_timeout) if split.wait else None)
            try:
                self.figures = _measured(self.devices, file, model, measure=split.tensor_split is None)
                self.fit = fit(file, model, wanted, self.figures, split)
                self._workers.expect_answers(None)
                break
            except BaseException as error:
                for device in self.devices[1:]:
                    device.close()
                if not isinstance(error, DeviceLost) or time.monotonic() >= until:
                    raise
                log.warning("%s; waiting for it", error.as_logged())
        self.left: set[int] = set()
        self.by_hand: Placement | None = None
        """The layout that a client requested, in place of the options."""
        self._tried: set[str] = set()  # names of devices that `measure` has tried
        self.split, self._trial = split, usual_weights(file, model)
        given, n = split.tensor_split, len(self.devices) - 1
        self._shares = [] if given is None else [*given[:n], *(0.0 for _ in range(n - len(given)))]
        self._home_share = None if not given or len(given) <= n else given[n]
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
        """Return the reasons why workers have nothing, by device number."""
        if placement == self.by_hand:
            workers = {number for number, known in enumerate(self.figures) if not known.local}
            found = dict.fromkeys(sorted(workers - set(placement.devices)), "layers were laid out without it")
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
        home = () if self._home_share is None else (self._home_share,)
        return replace(split, tensor_split=(*self._shares, *home))

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
            device.name = f"RPC{number - 1}[{device.endpoint}]"
            known = replace(known, name=device.name)
            if number in self.left:
                self.left.remove(number)
                self.figures[number] = known
                self._shares[number - 1 : number] = [share] if self._shares else []
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
        return self._workers.reconnect(lost, self._patience)

    def replace_lost(self, placement: Placement, alive: Sequence[int]) -> Placement:
        """Return the placement with the parts of other devices moved to these; raises NotEnoughMemory."""
        return replace_lost(self.fit.sizes, self.figures, placement, alive)


def _measured(devices: Sequence[Device], file: GGUFFile, model: Model, *, measure: bool) -> list[DeviceFigures]:
    """Return the figures of devices before the model is loaded, with speeds if `measure`."""
    if measure:
        type, width = usual_weights(file, model)
        figures = measure_all(devices, type=type, width=width)
    else:
        figures = [figures_of(device) for device in devices]
    figures[0] = before_reading(figures[0], file)
    return figures
