"""The accelerators that a model's options request, opened before it is loaded."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import NamedTuple

from llamado.devices.accelerators import Accelerators, accelerator_kinds
from llamado.devices.registry import DeviceOptions
from llamado.devices.split.placement import SplitOptions
from llamado.devices.split.rules import UnknownDevice
from llamado.engine.errors import EngineError
from llamado.engine.options import DraftOptions, EngineOptions

log = logging.getLogger(__name__)

_CPU = ("cpu", "none")


class Reserve(NamedTuple):
    """Bytes of memory: for the CPU, and on accelerators."""

    cpu: int
    accelerators: int


def open_accelerators(split: SplitOptions | None, options: DeviceOptions | None = None) -> Accelerators:
    """Open the accelerators that may get a part of a model."""
    if split is None or not split.gpus:
        return Accelerators.none()
    if _takes_all(split):
        return Accelerators(options)
    return Accelerators(options, _named(split))


def with_accelerators(options: EngineOptions) -> tuple[EngineOptions, Accelerators]:
    """Return the options for the devices that there are, and the accelerators among them.

    Without accelerators and workers the model stays on the CPU (`split` is None). Raises UnknownDevice for a named
    accelerator that cannot be used, and EngineError for an unsupported way to divide matrices.
    """
    split = options.split
    if split is None:
        none = Accelerators.none()
        return replace(options, drafts=_drafts(options.drafts, none)), none
    found = open_accelerators(split)
    try:
        _check(split, found)
        options = replace(options, drafts=_drafts(options.drafts, found))
    except BaseException:
        found.close()
        raise
    if found.devices or split.networked:
        return options, found
    if split.given and _takes_all(split):
        log.warning("%s: no effect: the model runs on this machine's CPU; %s", ", ".join(split.given), _why_none(found))
    return replace(options, split=None), found


def _drafts(drafts: DraftOptions, found: Accelerators) -> DraftOptions:
    """Return the options of drafts for the devices that there are: a draft model has the accelerators of its target,
    unless it names others.
    """
    split = drafts.split
    if split is None or split.networked:
        return drafts
    names = tuple(device.name for device in found.devices)
    if split.devices and (missing := [name for name in split.devices if name.upper() not in names]):
        raise UnknownDevice(f"--spec-draft-device {missing[0]}: the model itself is not on it (see --device)")
    return replace(drafts, split=replace(split, devices=split.devices or names) if names else None)


def _check(split: SplitOptions, found: Accelerators) -> None:
    if found.devices and split.mode in ("row", "tensor"):
        raise EngineError(f"-sm/--split-mode {split.mode}: not supported; use layer or none")
    if found.devices or split.networked:
        return  # names are checked when layers are placed
    for name in _named(split):
        if name.lower() not in _CPU:
            raise UnknownDevice(f"there is no device {name!r}; there is only the CPU: {_why_none(found)}")


def _takes_all(split: SplitOptions) -> bool:
    """Return True if every accelerator may get layers, not only named ones."""
    return not split.devices and split.n_gpu_layers != 0


def _named(split: SplitOptions) -> list[str]:
    """Return the names of devices in the options."""
    return [*split.devices, *(device for _, device in split.overrides)]


def _why_none(found: Accelerators) -> str:
    """Return why there is no accelerator."""
    reasons = [f"{kind.upper()}: {error}" for kind, error in found.problems.items()]
    if not reasons:
        kinds = ", ".join(kind.upper() for kind in accelerator_kinds())
        reasons = [f"no graphics card is in use ({kinds})" if kinds else "graphics cards are not supported"]
    return f"{'; '.join(reasons)}; --rpc adds workers"
