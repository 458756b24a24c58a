"""The check of a card when it is opened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cuda.cards import fake_device
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.lowerings.emulated import EmulatedCode
from llamado.devices.cuda.self_check import check
from llamado.devices.cuda.simt import Register
from llamado.devices.device import DeviceError

pytestmark = pytest.mark.slow


@pytest.fixture
def card() -> Iterator[CudaDevice]:
    device = fake_device()
    yield device
    device.close()


def test_a_card_with_the_bytes_of_the_cpu_is_accepted(card: CudaDevice) -> None:
    check(card)


def test_a_card_that_computes_other_bytes_is_refused(card: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded_twice(self: EmulatedCode, a: Register, b: Register, c: Register) -> Register:
        return a * b + c

    monkeypatch.setattr(EmulatedCode, "fma", rounded_twice)
    with pytest.raises(DeviceError, match=r"CUDA0 \(Fake Card\) computes other bytes .*attention.*driver"):
        check(card)
