"""Recovery from lost devices: move their layers, reconnect them, and give the layers back.

An accelerator of this machine that is out of memory counts as lost, and its layers move at once: there is no
other machine to wait for.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from llamado.devices.device import Device, DeviceError, DeviceFull, DeviceLost, WorkerLost, is_accelerator
from llamado.devices.split.placement import describe_parts
from llamado.engine.forward.device_tensors import DeviceOutOfMemory, DeviceTensors, Own
from llamado.engine.forward.events import Events
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.pipeline import Pipeline
from llamado.engine.request import Away
from llamado.models.batch import BatchShape

if TYPE_CHECKING:
    from llamado.devices.split.placement import Placement

log = logging.getLogger(__name__)


class DeviceRecovery:
    """Watches `devices` and replaces lost ones.

    `settle` gives devices what they lack in the present placement of `tensors`; `shapes` are batch shapes that need all
    memory.
    """

    def __init__(
        self,
        devices: list[Device],
        tensors: DeviceTensors,
        pipeline: Pipeline,
        shapes: Sequence[BatchShape],
        settle: Callable[[], None],
        options: RunnerOptions,
    ) -> None:
        self.reconnect, self.replace = options.reconnect, options.replace
        self.events = Events()
        self._devices, self._tensors, self._pipeline = devices, tensors, pipeline
        self._shapes, self._settle = shapes, settle
        self._watcher: Callable[[], None] = lambda: None
        self._lost: DeviceLost | None = None
        self._lost_since = 0.0
        self._first = tensors.placement  # the placement that devices get back on return
        self._away: dict[int, Away] = {}  # by device number
        self._calling: set[int] = set()  # devices that `call_back` is connecting
        self._back: dict[int, tuple[Device, Own]] = {}  # reconnected devices, with weights
        self._left: set[int] = set()  # numbers of devices that were removed
        self._full: dict[int, DeviceLost] = {}  # accelerators that are out of memory, by device number
        self._closed = False
        pipeline.on_lost, pipeline.on_full = self._check_losses, self.give_up
        for device in devices:
            self._guard(device)

    # -- losses ------------------------------------------------------------------------------------------------------

    def watch(self, callback: Callable[[], None]) -> None:
        """Set a callback, called from any thread, for the loss of a device."""
        self._watcher = callback

    def lost(self) -> DeviceLost | None:
        """Return the loss of a device, if one is lost."""
        return self._lost

    def _guard(self, device: Device) -> None:
        """Watch for the loss of a device."""
        device.on_lost(lambda _: self._check_losses())

    def give_up(self, number: int, error: DeviceFull) -> DeviceError:
        """Count an accelerator that is out of memory as lost; return its loss. Of other devices return the error: it
        ends one batch.
        """
        device = self._devices[number]
        if not is_accelerator(device):
            return error
        loss = self._full.setdefault(number, DeviceLost(device.name, f"it is out of memory: {error}"))
        self._check_losses()
        return loss

    def _loss(self, number: int) -> DeviceLost | None:
        """Return the loss of a device; None while it can be used."""
        return self._devices[number].lost or self._full.get(number)

    def _alive(self) -> list[int]:
        """Return the numbers of devices that can be used."""
        return [number for number in range(len(self._devices)) if self._loss(number) is None]

    def _check_losses(self) -> None:
        """Fail the batches in flight if a device or link they need is lost, so that no caller waits for them."""
        error = next((loss for i in self._tensors.used if (loss := self._loss(i)) is not None), None)
        error = error or self._pipeline.ring.lost
        if self._lost is None and error is not None:
            self._lost, self._lost_since = error, time.time()
            self.events.add("lost", error.device, error.why)
            self._pipeline.fail_in_flight(error)
            self._watcher()

    def restore(self, elsewhere: bool) -> None:
        """Attempt once to reconnect lost devices, or with `elsewhere` to move their layers to the others. Those of
        accelerators move without it, too.

        Raises DeviceLost while one is still gone, and DeviceError if the others have no room.
        """
        tensors = self._tensors
        self._pipeline.wait_idle()
        before = tensors.placement, tensors.used, self._lost
        away = self._reconnect_lost(elsewhere)
        try:
            if away:
                placement = tensors.placement
                is_waited_for = not elsewhere and not all(is_accelerator(self._devices[n]) for n in away)
                if is_waited_for or self._closed or self.replace is None or placement is None:
                    raise _combine_losses([*away.values()])
                tensors.placement = self.replace(placement, self._alive())
                log.warning("%s; moving its layers to the remaining devices", _combine_losses([*away.values()]))
            self._lost = None
            try:
                self._settle()
            except DeviceOutOfMemory as error:
                raise self.give_up(error.number, error) from error
            self._check_losses()  # another device was lost while one was reconnected
            if self._lost is not None:
                raise self._lost
        except BaseException as error:
            tensors.placement, tensors.used, self._lost = before
            if isinstance(error, DeviceLost):
                self._lost = error
            raise
        gone = {n: Away(loss.device, loss.why, self._lost_since, "", {}) for n, loss in away.items()}
        self._away = gone | self._away
        self._note_moves(before[0])
        self._report_placement()

    def _reconnect_lost(self, elsewhere: bool) -> dict[int, DeviceLost]:
        """Reconnect lost devices; return by number the losses of needed devices that are still gone.

        A device without a part is reconnected only if layers may have to move to it.
        """
        away: dict[int, DeviceLost] = {}
        for number, device in enumerate(self._devices):
            if self._loss(number) is None or not (number in self._tensors.used or elsewhere):
                continue
            if number in self._calling or number in self._left:
                continue
            self._forget(number)
            if (full := self._full.get(number)) is not None:
                away |= {number: full} if number in self._tensors.used else {}
                continue
            try:
                found = self._connect(device)
                if self._closed:
                    found.close()
                    raise DeviceLost(device.name, "it is not needed any more")
                self._devices[number] = found
                self._guard(found)
                self.events.add("back", found.name, "it is connected again")
            except DeviceLost as error:
                if number in self._tensors.used:
                    away[number] = error
        return away

    # -- returns -----------------------------------------------------------------------------------------------------

    def away(self) -> Sequence[Away]:
        """Return the devices whose layers moved to others."""
        return tuple(self._away.values())

    def call_back(self) -> None:
        """Attempt once to reconnect those devices and send them weights, while batches go on.

        On return `move_back` can be called. Raises DeviceLost while all of them are unreachable.
        """
        gone: list[DeviceLost] = []
        for number in list(self._away):
            if number in self._back or self._loss(number) is None:
                continue
            self._calling.add(number)
            found: Device | None = None
            try:
                found = self._connect(self._devices[number])
                assert self._first is not None
                self._back[number] = found, self._tensors.send_ahead(number, found, self._first, self._shapes)
            except BaseException as error:
                self._calling.discard(number)
                if found is not None:
                    found.close()
                if not isinstance(error, DeviceLost):
                    raise
                gone.append(error)
            if self._closed:
                self.close()
                return
        if len(gone) == len(self._away):
            raise _combine_losses(gone)

    def move_back(self) -> None:
        """Move layers back to the reconnected devices; all cells are void then.

        Raises DeviceLost if one of them is gone again: everything is unchanged then, or `lost` returns a further loss.
        """
        tensors = self._tensors
        self._pipeline.wait_idle()
        before = tensors.placement, tensors.used
        self._take_back()
        alive = self._alive()
        try:
            whole = self._first is None or set(self._first.devices) <= set(alive)
            if not whole and self.replace is not None and self._first is not None:
                tensors.placement = self.replace(self._first, alive)
            else:
                tensors.placement = self._first
            self._settle()
            self._check_losses()
            if self._lost is not None:
                raise self._lost
        except BaseException as error:
            tensors.placement, tensors.used = before
            self._lost = None
            for number in range(len(self._devices)):
                if number not in tensors.used and self._loss(number) is not None:
                    self._forget(number)
            self._check_losses()
            if self._lost is None:
                self._settle()
            elif isinstance(error, DeviceLost):
                self._lost = error
            raise
        for number in sorted(set(self._away) & set(alive)):
            log.info("%s: back, has its layers again", self._devices[number].name)
            self.events.add("back", self._devices[number].name, "it has its layers again")
        self._away = {number: away for number, away in self._away.items() if number not in alive}
        self._note_moves(before[0])
        self._report_placement()

    def _take_back(self) -> None:
        """Put reconnected devices back in their places."""
        while self._back:
            number, (device, weights) = self._back.popitem()
            self._forget(number)
            self._full.pop(number, None)
            self._devices[number] = device
            self._guard(device)
            self._tensors.adopt(weights)
            self._calling.discard(number)
            if device.lost is not None:
                self._forget(number)

    # -- devices that join and leave ---------------------------------------------------------------------------------

    def send_ahead(self, placement: Placement, new: Mapping[int, Device]) -> list[Own]:
        """Send devices the weights that `placement` requires there and that they lack, while batches go on.

        Runs on a thread of its own. `new` devices have no part yet, and have their future numbers.
        """
        sent = []
        for number in placement.devices:
            device = new.get(number) or self._devices[number]
            if not device.local and (number in new or self._loss(number) is None):
                sent.append(self._tensors.send_ahead(number, device, placement, self._shapes, anew=number in new))
        return sent

    def change(self, placement: Placement, new: Mapping[int, Device], left: Sequence[int], sent: Sequence[Own]) -> None:
        """Switch to `placement`: add `new` devices, and remove those that `left`.

        Runs on the engine's thread; all cells are void if anything moved. Raises DeviceLost or DeviceError: everything
        is unchanged then, and `new` devices are closed.
        """
        tensors = self._tensors
        self._pipeline.wait_idle()
        before = tensors.placement, tensors.used, self._first
        for number, device in sorted(new.items()):
            self._left.discard(number)
            if number == len(self._devices):
                self._devices.append(device)
            else:
                tensors.forget(number)
                self._devices[number] = device
            self._guard(device)
        for own in sent:
            tensors.adopt(own)
        staying = [number for number in self._alive() if number not in left]
        try:
            whole = set(placement.devices) <= set(staying)
            if not whole and self.replace is None:
                raise _combine_losses([loss for i in range(len(self._devices)) if (loss := self._loss(i)) is not None])
            tensors.placement = placement if whole or self.replace is None else self.replace(placement, staying)
            self._first = placement
            self._settle()
            self._check_losses()
            if self._lost is not None:
                raise self._lost
        except BaseException:
            tensors.placement, tensors.used, self._first = before
            for number in new:
                self._left.add(number)
                self._forget(number)
            self._lost = None
            self._check_losses()
            if self._lost is None:
                self._settle()
            raise
        for number in left:
            self._left.add(number)
            self._away.pop(number, None)
            self._forget(number)
        tensors.shed(self._shapes)
        self._note_moves(before[0])
        self._report_placement()

    def alone(self, work: Callable[[Sequence[Device]], None]) -> None:
        """Run `work` on the devices while no batch runs. Engine's thread only."""
        self._pipeline.wait_idle()
        work(self._devices)

    def close(self) -> None:
        """Stop recovery; close reconnected devices without a part."""
        self._closed = True
        self._watcher = lambda: None
        while self._back:
            self._back.popitem()[1][0].close()

    # -- devices -----------------------------------------------------------------------------------------------------

    def _connect(self, lost: Device) -> Device:
        if self.reconnect is None:
            raise DeviceLost(lost.name, "it was not to be connected again")
        return self.reconnect(lost)

    def _forget(self, number: int) -> None:
        """Drop all references to a device's memory."""
        with suppress(DeviceError):  # of a card that does not respond
            self._devices[number].close()
        self._tensors.forget(number)

    def _note_moves(self, before: Placement | None) -> None:
        """Log an event for every device whose part changed."""
        now = self._tensors.placement
        old, new = ({} if placement is None else describe_parts(placement) for placement in (before, now))
        for number in sorted({*old, *new}):
            if old.get(number) != new.get(number):
                self.events.add("moved", self._devices[number].name, f"it has {new.get(number, 'nothing')}")

    def _report_placement(self) -> None:
        placement = self._tensors.placement
        if placement is None or self._first is None or not self._away:
            return
        first, now = describe_parts(self._first), describe_parts(placement)
        names = {self._devices[number].name: text for number, text in now.items()}
        self._away = {
            number: away._replace(layers=first.get(number, "nothing"), now=names) for number, away in self._away.items()
        }
        for name, text in names.items():
            log.info("%s: %s", name, text)


def _combine_losses(errors: Sequence[DeviceLost]) -> DeviceLost:
    """Combine losses to one that names all devices."""
    if len(errors) == 1:
        return errors[0]
    whys = dict.fromkeys(error.why for error in errors)
    kinds = {type(error) for error in errors}
    kind = WorkerLost if kinds == {WorkerLost} else DeviceLost
    return kind(" and ".join(error.device for error in errors), "; ".join(whys))
