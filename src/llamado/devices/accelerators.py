"""The accelerators of this machine: devices with memory of their own, such as graphics cards.

Every local kind of the registry except the CPU is one. A kind without a usable device is left out; the reason is kept
for messages.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import NamedTuple, Self

from llamado.devices.cards import has_card
from llamado.devices.device import Device, DeviceError, DeviceLost
from llamado.devices.registry import Backend, DeviceOptions, backend, local_kinds
from llamado.errors import LlamadoError

log = logging.getLogger(__name__)

_HOST = "cpu"
"""The kind whose memory is this machine's own."""
_NUMBERED = re.compile(r"([a-z]+)\d*", re.IGNORECASE)


def accelerator_kinds() -> tuple[str, ...]:
    """Return the kinds of accelerators that this program has a back end for."""
    return tuple(kind for kind in local_kinds() if kind != _HOST)


def kind_of(name: str) -> str | None:
    """Return the kind of accelerator that a device's name ("CUDA0") belongs to; None for other names."""
    match = _NUMBERED.fullmatch(name)
    kind = match[1].lower() if match else ""
    return kind if kind in accelerator_kinds() else None


class Accelerators:
    """Opened accelerators, in the order of their kinds and numbers.

    `problems`: the reason why a kind has no usable device.
    """

    def __init__(self, options: DeviceOptions | None = None, names: Sequence[str] | None = None) -> None:
        """Open all accelerators, or those of `names`; other names are ignored."""
        wanted = None if names is None else {name.lower() for name in names}
        self.devices: list[Device] = []
        self.problems: dict[str, LlamadoError] = {}
        self._backends: dict[str, Backend] = {}
        for kind in accelerator_kinds():
            if names is not None and kind not in map(kind_of, names):
                continue
            self._backends[kind] = backend(kind, (), options)
            try:
                found = self._backends[kind].devices()
            except DeviceError as error:
                self.problems[kind] = error
                # most machines have no card; a card that cannot be used is worth a line
                log.log(logging.WARNING if has_card(kind) else logging.DEBUG, "%s: not used: %s", kind.upper(), error)
                continue
            for device in found:
                if wanted is None or device.name.lower() in wanted:
                    self.devices.append(device)
                else:
                    device.close()

    @classmethod
    def none(cls) -> Self:
        """Return no accelerators."""
        return cls(names=())

    def reconnect(self, lost: Device, timeout: float) -> Device:
        """Open a new device in place of a lost one, under the same name. Raises DeviceLost while there is none."""
        kind = kind_of(lost.name)
        if kind not in self._backends:
            raise DeviceLost(lost.name, "it is no device of this machine")
        return self._backends[kind].reconnect(lost, timeout)

    def take(self) -> list[Device]:
        """Return the devices; from now on the caller closes them."""
        devices, self.devices = self.devices, []
        return devices

    def close(self) -> None:
        """Close the devices that were not taken."""
        for device in self.take():
            device.close()


class LocalDevices(NamedTuple):
    """The devices of this machine. `reserved`: bytes of the accelerators' memory that are left to others."""

    cpu: Device
    accelerators: Accelerators
    reserved: int = 0
