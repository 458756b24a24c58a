"""The devices a model is divided among, and who has what."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from llamado.devices.device import Device, DeviceLost
from llamado.devices.registry import Unreachable, backend
from llamado.devices.split.explain import holdings, idle, shares_text
from llamado.devices.split.failover import without
from llamado.devices.split.measure import figures_of, measure, measure_all
from llamado.devices.split.placement import (
    DeviceFigures,
    Placement,
    SplitOptions,
)
from llamado.devices.split.rules import place
from llamado.engine.forward.fitting import MemoryOptions, before_reading, fit
from llamado.engine.forward.sizes import usual_weights
from llamado.engine.options import Report
from llamado.gguf.reader import GGUFFile
from llamado.models.base import Model

log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds that a lost worker gets for answering, in each attempt to reach it again."""
_LEAST_PATIENCE = 0.5


class DevicePool:
    """This machine (device 0) and the workers of `split`; connected, measured where that is needed, and placed.

    `fit`: the context and the placement that `wanted` comes to. `figures` of all devices as they were before the model
    was loaded; `left`: the places among them of workers that were taken away. Raises WorkersUnreachable,
    NotEnoughMemory (before a byte is sent), UnknownDevice.
    """

    def __init__(
        self,
        split: SplitOptions,
        here: Device,
        file: GGUFFile,
        model: Model,
        wanted: MemoryOptions,
        progress: Report | None = None,
    ) -> None:
        # One that does not answer at all must not use up the time after which its layers go elsewhere.
        self._patience = (
            _PATIENCE if split.failover is None else max(min(_PATIENCE, split.failover / 2), _LEAST_PATIENCE)
        )
        self._workers = backend("rpc", split.rpc, split.reaching(file.shard_paths))

        def waiting(missing: Sequence[Unreachable]) -> None:
            if progress is not None:
                names = "; ".join(worker.why for worker in missing)
                progress(f"waiting for workers: {names}" if missing else "connecting to workers", 0, 0)

        until: float | None = None  # when no worker that is lost meanwhile is waited for any more
        while True:
            self.devices: list[Device] = [here, *self._workers.devices(split.wait, waiting)]
            try:
                self.figures = _measured(self.devices, file, model, measure=split.tensor_split is None)
                self.fit = fit(file, model, wanted, self.figures, split)
                break
            except BaseException as error:
                for device in self.devices[1:]:
                    device.close()
                until = time.monotonic() + split.wait if until is None else until
                if not isinstance(error, DeviceLost) or time.monotonic() >= until:
                    raise
                log.warning("%s; waiting for it", error.as_logged())
        self.left: set[int] = set()
        self.by_hand: Placement | None = None
        """What somebody laid out, in place of what the options ask for."""
        self._tried: set[str] = set()  # names of devices that `measure` has seen
        self._split, self._trial = split, usual_weights(file, model)
        given, n = split.tensor_split, len(self.devices) - 1
        self._shares = [] if given is None else [*given[:n], *(0.0 for _ in range(n - len(given)))]
        self._home_share = None if not given or len(given) <= n else given[n]
        if text := shares_text(self.figures, split):
            log.info("%s", text)

    # -- who has what --------------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[int]:
        """The places of all devices that belong here, whether they are there or not."""
        return [number for number in range(len(self.figures)) if number not in self.left]

    def plan(self, members: Sequence[int]) -> Placement:
        """The placement that the user's options ask for on these devices. Raises NotEnoughMemory."""
        return place(self.fit.sizes, self.figures, self._options, members)

    def idle(self, placement: Placement) -> dict[int, str]:
        """Why workers have nothing, in words, by their places."""
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
            log.info("%s gets no layers: %s", self.figures[number].name, why)

    @property
    def _options(self) -> SplitOptions:
        """What the user asked for, with the shares of workers that joined."""
        split = self._split
        if not split.tensor_split:
            return split
        home = () if self._home_share is None else (self._home_share,)
        return replace(split, tensor_split=(*self._shares, *home))

    @property
    def unmeasured(self) -> list[int]:
        """The places of devices whose speed nobody has tried to measure."""
        return [n for n in self.members if self.figures[n].decode is None and self.figures[n].name not in self._tried]

    def measure(self, devices: Sequence[Device]) -> None:
        """Finds the speeds of those of `devices` (by their places) that are there and whose speed nobody measured yet;
        nothing else may run on them meanwhile.
        """
        type, width = self._trial
        lacking = [n for n in self.unmeasured if devices[n].lost is None]
        found = measure_all([devices[n] for n in lacking], type=type, width=width)
        for number, figures in zip(lacking, found, strict=True):
            known = self.figures[number]
            self.figures[number] = replace(figures, name=known.name, free=known.free, total=known.total)
            self._tried.add(known.name)

    # -- who comes and goes --------------------------------------------------------------------------------------------

    def add(self, endpoint: str, share: float, speeds: Sequence[float | None]) -> dict[int, Device]:
        """The devices of one more worker by their places; measured, or where proportions are given with the `speeds` it
        told of each. Raises a LlamadoError.
        """
        found = self._workers.add(endpoint)
        try:
            if self._split.tensor_split is None:
                type, width = self._trial
                figures = [measure(device, type=type, width=width) for device in found]
            else:
                told = [*speeds, *(None for _ in found)]
                figures = [replace(figures_of(device), decode=told[i]) for i, device in enumerate(found)]
        except BaseException:
            self._workers.remove(endpoint)
            for device in found:
                device.close()
            raise
        added: dict[int, Device] = {}
        for device, known in zip(found, figures, strict=True):
            number = min(self.left, default=len(self.figures))
            device.name = f"RPC{number - 1}[{device.endpoint}]"
            known = replace(known, name=device.name)
            if number in self.left:
                self.left.remove(number)
                self.figures[number] = known
                self._shares[number - 1 : number] = [share] if self._shares else []
            else:
                self.figures.append(known)
                if self._split.tensor_split:
                    self._shares.append(share)
            added[number] = device
        return added

    def take_away(self, endpoint: str, numbers: Sequence[int]) -> None:
        """A worker does not belong here any more."""
        self._workers.remove(endpoint)
        self.left.update(numbers)

    def reconnect(self, lost: Device) -> Device:
        """A new device in the place of a lost one; raises DeviceLost while there is none."""
        return self._workers.reconnect(lost, self._patience)

    def without(self, placement: Placement, alive: Sequence[int]) -> Placement:
        """The placement with what was on other devices moved to these; raises NotEnoughMemory."""
        return without(self.fit.sizes, self.figures, placement, alive)


def _measured(devices: Sequence[Device], file: GGUFFile, model: Model, *, measure: bool) -> list[DeviceFigures]:
    """Figures of devices before the model is loaded, with speeds where they are to be measured."""
    if measure:
        type, width = usual_weights(file, model)
        figures = measure_all(devices, type=type, width=width)
    else:
        figures = [figures_of(device) for device in devices]
    figures[0] = before_reading(figures[0], file)
    return figures
