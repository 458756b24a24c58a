"""The CUDA back end (`devices/registry.py`): the cards of this machine."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from llamado.devices.device import Device, DeviceError, DeviceLost
from llamado.devices.registry import DeviceOptions, LocalBackend, WaitCallback

if TYPE_CHECKING:
    from llamado.devices.cuda.driver import Driver

log = logging.getLogger("llamado.devices")

_LEAST_CAPABILITY = (7, 5)
"""Compute capability of the oldest cards that the kernels are made for: GeForce RTX 20, T4."""


class CudaBackend(LocalBackend):
    """Opens cards. `places`: their numbers; all cards if there are none. The driver is loaded on first use."""

    def __init__(self, places: Sequence[str], options: DeviceOptions) -> None:
        self._places = list(places)

    def devices(self, wait: float = 0.0, waiting: WaitCallback | None = None) -> list[Device]:
        """Open the cards; one that fails is left out with a warning. Raises `NoDriver` with advice, or the failure if
        all fail.
        """
        driver = _driver()
        numbers = [_number(place) for place in self._places] or range(driver.count())
        opened: list[Device] = []
        failures: list[DeviceError] = []
        for number in numbers:
            try:
                opened.append(_open(driver, number))
            except DeviceError as error:
                failures.append(error)
        if failures and not opened:
            raise failures[0]
        for failure in failures:
            log.warning("a card is not used: %s", failure)
        return opened

    def reconnect(self, lost: Device, timeout: float = 2.0) -> Device:
        """Open the card of a lost device again, which gives it a new context. Raises `DeviceLost`."""
        with suppress(DeviceError):
            lost.close()
        try:
            return _open(_driver(), int(re.sub(r"\D", "", lost.name)))
        except DeviceLost:
            raise
        except DeviceError as error:
            raise DeviceLost(lost.name, str(error)) from error

    def open(self, place: str) -> list[Device]:
        return [_open(_driver(), _number(place))]


def _driver() -> Driver:
    from llamado.devices.cuda.driver import Driver

    return Driver()


def _open(driver: Driver, number: int) -> Device:
    # imports that only machines with a card need
    from llamado.devices.cuda.device import CudaDevice
    from llamado.devices.cuda.jit import PtxImages
    from llamado.devices.cuda.self_check import check

    properties = driver.properties(number)
    if properties.capability < _LEAST_CAPABILITY:
        raise DeviceError(
            f"{properties.name} has compute capability {properties.capability[0]}.{properties.capability[1]}; "
            f"{_LEAST_CAPABILITY[0]}.{_LEAST_CAPABILITY[1]} is needed: --device none computes on the CPU"
        )
    with ExitStack() as opened:
        card = driver.open(number)
        opened.callback(card.close)
        device = CudaDevice(card, PtxImages(card))
        opened.callback(device.close)
        check(device)
        opened.pop_all()
    return device


def _number(place: str) -> int:
    if not place.isdecimal():
        raise DeviceError(f"{place!r} is not the number of a card: cuda://0 is the first one")
    return int(place)
