"""The devices a model is divided among, and who has what."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from llamado.devices.device import Device
from llamado.devices.registry import DeviceOptions, backend
from llamado.devices.split.failover import without
from llamado.devices.split.measure import figures_of, measure_all
from llamado.devices.split.placement import (
    Placement,
    SplitOptions,
    held,
)
from llamado.devices.split.rules import idle
from llamado.engine.forward.fitting import MemoryOptions, before_reading, fit
from llamado.engine.forward.sizes import usual_weights
from llamado.gguf.reader import GGUFFile
from llamado.models.base import Model

log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds that a lost worker gets for answering, in each attempt to reach it again."""
_LEAST_PATIENCE = 0.5


class DevicePool:
    """This machine (device 0) and the workers of `split`; connected, measured where that is needed, and placed.

    `fit`: the context and the placement that `wanted` comes to. Raises WorkersUnreachable, NotEnoughMemory (before a
    byte is sent), UnknownDevice.
    """

    def __init__(self, split: SplitOptions, here: Device, file: GGUFFile, model: Model, wanted: MemoryOptions) -> None:
        # One that does not answer at all must not use up the time after which its layers go elsewhere.
        self._patience = (
            _PATIENCE if split.failover is None else max(min(_PATIENCE, split.failover / 2), _LEAST_PATIENCE)
        )
        options = DeviceOptions(files=file.shard_paths, ca=split.ca, cert=split.cert, key=split.key)
        self._workers = backend("rpc", split.rpc, options)
        self.devices: list[Device] = [here, *self._workers.devices()]
        try:
            if split.tensor_split is None:
                type, width = usual_weights(file, model)
                self._figures = measure_all(self.devices, type=type, width=width)
            else:
                self._figures = [figures_of(device) for device in self.devices]
            self._figures[0] = before_reading(self._figures[0], file)
            self.fit = fit(file, model, wanted, self._figures, split)
        except BaseException:
            for device in self.devices[1:]:
                device.close()
            raise
        for number, text in held(self.fit.placement).items():
            log.info("%s: %s", self.devices[number].name, text)
        for number, why in idle(self.fit.sizes, self._figures, split, self.fit.placement).items():
            log.warning("%s gets no layers: %s", self.devices[number].name, why)

    def reconnect(self, lost: Device) -> Device:
        """A new device in the place of a lost one; raises DeviceLost while there is none."""
        return self._workers.reconnect(lost, self._patience)

    def without(self, placement: Placement, alive: Sequence[int]) -> Placement:
        """The placement with what was on other devices moved to these; raises NotEnoughMemory."""
        return without(self.fit.sizes, self._figures, placement, alive)
