"""Devices that are lost, what becomes of their layers, and devices that come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from llamado.devices.device import Device, DeviceLost
from llamado.devices.split.placement import held
from llamado.engine.forward.device_tensors import DeviceTensors, Own
from llamado.engine.forward.events import Events
from llamado.engine.forward.pipeline import Pipeline
from llamado.engine.request import Away
from llamado.models.batch import BatchShape

if TYPE_CHECKING:
    from llamado.devices.split.placement import Placement

log = logging.getLogger(__name__)

Reconnect = Callable[[Device], Device]
"""A new device in the place of a lost one; raises DeviceLost while there is none."""
Replace = Callable[["Placement", Sequence[int]], "Placement"]
"""A placement that keeps to the devices of these numbers; raises DeviceError where they have no room."""


class DeviceRecovery:
    """Keeps watch over `devices` and puts others in the places of lost ones; its methods are those of Forward.

    `settle` gives devices what they lack by the placement that `tensors` has then; `shapes` need all there is to have.
    """

    def __init__(
        self,
        devices: list[Device],
        tensors: DeviceTensors,
        pipeline: Pipeline,
        shapes: Sequence[BatchShape],
        settle: Callable[[], None],
        reconnect: Reconnect | None,
        replace: Replace | None,
    ) -> None:
        self.reconnect, self.replace = reconnect, replace
        self.events = Events()
        self._devices, self._tensors, self._pipeline = devices, tensors, pipeline
        self._shapes, self._settle = shapes, settle
        self._watcher: Callable[[], None] = lambda: None
        self._lost: DeviceLost | None = None
        self._lost_since = 0.0
        self._first = tensors.placement  # what devices that come back get back
        self._away: dict[int, Away] = {}  # by number of the device
        self._calling: set[int] = set()  # those that `call_back` has a hand on
        self._back: dict[int, tuple[Device, Own]] = {}  # those that are there, with weights
        self._left: set[int] = set()  # places of devices that were taken away
        self._closed = False
        pipeline.on_lost = self._look_for_lost
        for device in devices:
            self._guard(device)

    # -- losses ------------------------------------------------------------------------------------------------------

    def watch(self, callback: Callable[[], None]) -> None:
        """See Forward."""
        self._watcher = callback

    def lost(self) -> DeviceLost | None:
        """See Forward."""
        return self._lost

    def _guard(self, device: Device) -> None:
        """Has us told when a device is lost."""
        device.on_lost(lambda _: self._look_for_lost())

    def _look_for_lost(self) -> None:
        """Whoever waits for a batch need not wait for the parts of it that are still computed elsewhere."""
        error = next((loss for i in self._tensors.used if (loss := self._devices[i].lost) is not None), None)
        error = error or self._pipeline.ring.lost
        if self._lost is None and error is not None:
            self._lost, self._lost_since = error, time.time()
            self.events.add("lost", error.device, error.why)
            self._pipeline.give_up(error)
            self._watcher()

    def restore(self, elsewhere: bool) -> None:
        """See Forward."""
        tensors = self._tensors
        self._pipeline.stand_still()
        before = tensors.placement, tensors.used, self._lost
        away = self._bring_back(elsewhere)
        try:
            if away:
                placement = tensors.placement
                if not elsewhere or self.replace is None or placement is None:
                    raise _together([*away.values()])
                tensors.placement = self.replace(placement, _alive(self._devices))
                log.warning("%s; moving its layers to the other devices", _together([*away.values()]))
            self._lost = None
            self._settle()
            self._look_for_lost()  # one that died while another was brought back
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
        self._tell_what_is_where()

    def _bring_back(self, elsewhere: bool) -> dict[int, DeviceLost]:
        """Connects lost devices again; by number those of which a part is needed and that are still gone.

        One of which nothing is needed is only looked for when layers may have to go there.
        """
        away: dict[int, DeviceLost] = {}
        for number, device in enumerate(self._devices):
            if device.lost is None or not (number in self._tensors.used or elsewhere):
                continue
            if number in self._calling or number in self._left:
                continue
            self._forget(number)
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
        """See Forward."""
        return tuple(self._away.values())

    def call_back(self) -> None:
        """See Forward."""
        gone: list[DeviceLost] = []
        for number in list(self._away):
            if number in self._back or self._devices[number].lost is None:
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
            raise _together(gone)

    def move_back(self) -> None:
        """See Forward."""
        tensors = self._tensors
        self._pipeline.stand_still()
        before = tensors.placement, tensors.used
        self._take_back()
        alive = _alive(self._devices)
        try:
            whole = self._first is None or set(self._first.devices) <= set(alive)
            if not whole and self.replace is not None and self._first is not None:
                tensors.placement = self.replace(self._first, alive)
            else:
                tensors.placement = self._first
            self._settle()
            self._look_for_lost()
            if self._lost is not None:
                raise self._lost
        except BaseException as error:
            tensors.placement, tensors.used = before
            self._lost = None
            for number, device in enumerate(self._devices):
                if number not in tensors.used and device.lost is not None:
                    self._forget(number)
            self._look_for_lost()
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
        self._tell_what_is_where()

    def _take_back(self) -> None:
        """Devices that were called back are in their old places."""
        while self._back:
            number, (device, weights) = self._back.popitem()
            self._forget(number)
            self._devices[number] = device
            self._guard(device)
            self._tensors.adopt(weights)
            self._calling.discard(number)
            if device.lost is not None:
                self._forget(number)

    # -- devices that join and leave ---------------------------------------------------------------------------------

    def send_ahead(self, placement: Placement, new: Mapping[int, Device]) -> list[Own]:
        """Gives devices elsewhere the weights that `placement` wants there and that they lack, while batches go on.

        From a thread of its own; `new` ones have no part yet, and are numbered as they will be.
        """
        sent = []
        for number in placement.devices:
            device = new.get(number) or self._devices[number]
            if not device.local and device.lost is None:
                sent.append(self._tensors.send_ahead(number, device, placement, self._shapes, anew=number in new))
        return sent

    def change(self, placement: Placement, new: Mapping[int, Device], left: Sequence[int], sent: Sequence[Own]) -> None:
        """Everything belongs where `placement` has it from now on: on `new` devices, too, on those that `left` no more.

        Of the engine's thread; all cells are void then where anything moves. Raises DeviceLost or DeviceError: all is
        as it was then, and `new` devices are closed.
        """
        tensors = self._tensors
        self._pipeline.stand_still()
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
        staying = [number for number in _alive(self._devices) if number not in left]
        try:
            whole = set(placement.devices) <= set(staying)
            if not whole and self.replace is None:
                raise _together([loss for device in self._devices if (loss := device.lost) is not None])
            tensors.placement = placement if whole or self.replace is None else self.replace(placement, staying)
            self._first = placement
            self._settle()
            self._look_for_lost()
            if self._lost is not None:
                raise self._lost
        except BaseException:
            tensors.placement, tensors.used, self._first = before
            for number in new:
                self._left.add(number)
                self._forget(number)
            self._lost = None
            self._look_for_lost()
            if self._lost is None:
                self._settle()
            raise
        for number in left:
            self._left.add(number)
            self._away.pop(number, None)
            self._forget(number)
        tensors.shed(self._shapes)
        self._note_moves(before[0])
        self._tell_what_is_where()

    def alone(self, work: Callable[[Sequence[Device]], None]) -> None:
        """Has `work` done on the devices while no batch is; of the engine's thread."""
        self._pipeline.stand_still()
        work(self._devices)

    def close(self) -> None:
        """Nothing is to be restored any more; devices that came back and have no part are closed."""
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
        """Whatever a device held is gone."""
        self._devices[number].close()
        self._tensors.forget(number)

    def _note_moves(self, before: Placement | None) -> None:
        """Says who has something else than before."""
        now = self._tensors.placement
        old, new = ({} if placement is None else held(placement) for placement in (before, now))
        for number in sorted({*old, *new}):
            if old.get(number) != new.get(number):
                self.events.add("moved", self._devices[number].name, f"it has {new.get(number, 'nothing')}")

    def _tell_what_is_where(self) -> None:
        placement = self._tensors.placement
        if placement is None or self._first is None or not self._away:
            return
        first, now = held(self._first), held(placement)
        names = {self._devices[number].name: text for number, text in now.items()}
        self._away = {
            number: away._replace(layers=first.get(number, "nothing"), now=names) for number, away in self._away.items()
        }
        for name, text in names.items():
            log.info("%s: %s", name, text)


def _alive(devices: Sequence[Device]) -> list[int]:
    """The numbers of devices that are there."""
    return [i for i, device in enumerate(devices) if device.lost is None]


def _together(errors: Sequence[DeviceLost]) -> DeviceLost:
    """One loss that names all devices."""
    if len(errors) == 1:
        return errors[0]
    whys = dict.fromkeys(error.why for error in errors)
    return DeviceLost(" and ".join(error.device for error in errors), "; ".join(whys))
