"""The accelerator that encodes pictures and sounds (`--mmproj-offload`, `--mmproj-device`)."""

from __future__ import annotations

import logging
from collections.abc import Callable

from llamado.devices.accelerators import Accelerators, kind_of
from llamado.devices.device import Device
from llamado.devices.split.placement import SplitOptions
from llamado.devices.split.rules import UnknownDevice
from llamado.engine.media.placed_encoders import missing_operation
from llamado.engine.options import EngineOptions
from llamado.models.encoders.registry import MediaEncoders

log = logging.getLogger(__name__)

_CPU = ("cpu", "none")


def open_accelerator(
    options: EngineOptions, split: SplitOptions | None, encoders: MediaEncoders, numerics: str | None
) -> Device | None:
    """Open the accelerator for the encoders, which must have the CPU's `numerics`; return None for the CPU.

    It is the one that the user names, or else the first one that the model may use: `split` are the options as the user
    gave them. Raises UnknownDevice if there is no device of the name.
    """
    if not options.mmproj_offload or options.mmproj_device.lower() in _CPU:
        return None
    names = [options.mmproj_device] if options.mmproj_device else _names(split)
    if names == []:
        return None
    found = Accelerators(names=names)
    try:
        device = _first(found, names)
        if device is None:
            if options.mmproj_device:
                reasons = "; ".join(f"{kind.upper()}: {error}" for kind, error in found.problems.items())
                raise UnknownDevice(
                    f"-mmdev/--mmproj-device {options.mmproj_device}: there is no such accelerator of this machine"
                    + (f" ({reasons})" if reasons else "")
                )
            return None
        missing = missing_operation(device, encoders)
        if missing or device.numerics != numerics:
            why = f"{device.name} has no {missing}" if missing else f"{device.name} rounds in other ways"
            log.warning("encoders: pictures and sounds are encoded on the CPU: %s", why)
            return None
        found.devices.remove(device)
        return device
    finally:
        found.close()


def _names(split: SplitOptions | None) -> list[str] | None:
    """Return the names of the accelerators that the model may use, in order; None: any."""
    if split is None or not split.gpus:
        return []
    if split.devices:
        return [name for name in split.devices if kind_of(name) is not None]
    return None


def _first(found: Accelerators, names: list[str] | None) -> Device | None:
    """Return the first opened device, in the order of the names."""
    if names is None:
        return next(iter(found.devices), None)
    order: Callable[[Device], int] = lambda device: [name.lower() for name in names].index(device.name.lower())  # noqa: E731
    return min(found.devices, key=order, default=None)
