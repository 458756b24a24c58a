"""The CUDA back end: which cards it opens."""

from __future__ import annotations

import logging

import pytest

from cuda.cards import run
from cuda.fake_libcuda import FakeCard, FakeLibrary
from llamado.devices.cuda import backend, self_check
from llamado.devices.cuda.backend import CudaBackend
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.driver import Driver
from llamado.devices.cuda.lowerings.emulated import EmulatedImages
from llamado.devices.device import Device, DeviceError, DeviceLost
from llamado.devices.registry import DeviceOptions


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Two cards of this machine, which pass the check."""
    found = FakeLibrary(run, [FakeCard(), FakeCard(name="Other Card")])
    monkeypatch.setattr(backend, "_driver", lambda: Driver(found))
    monkeypatch.setattr("llamado.devices.cuda.jit.PtxImages", lambda card: EmulatedImages())
    monkeypatch.setattr(self_check, "check", lambda card: None)
    return found


def opened(*places: str) -> list[Device]:
    return CudaBackend(places, DeviceOptions()).devices()


def test_all_cards_are_opened_or_those_of_the_places(library: FakeLibrary) -> None:
    assert [device.name for device in opened()] == ["CUDA0", "CUDA1"]
    assert [device.name for device in opened("1")] == ["CUDA1"]
    with pytest.raises(DeviceError, match="there is no card 7"):
        opened("7")
    with pytest.raises(DeviceError, match="'first' is not the number of a card"):
        opened("first")


def test_an_old_card_is_left_out(library: FakeLibrary, caplog: pytest.LogCaptureFixture) -> None:
    library.cards[0].capability = (7, 0)
    with caplog.at_level(logging.WARNING):
        assert [device.name for device in opened()] == ["CUDA1"]
    assert "Fake Card has compute capability 7.0; 7.5 is needed" in caplog.text
    with pytest.raises(DeviceError, match=r"7\.5 is needed: --device none"):
        opened("0")


def test_a_card_that_fails_the_check_is_left_out(
    library: FakeLibrary, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check(card: CudaDevice) -> None:
        if card.name == "CUDA0":
            raise DeviceError("CUDA0 computes other bytes")

    monkeypatch.setattr(self_check, "check", check)
    with caplog.at_level(logging.WARNING):
        assert [device.name for device in opened()] == ["CUDA1"]
    assert "a card is not used: CUDA0 computes other bytes" in caplog.text
    assert library.cards[0].users == 0, "its context is released"


def test_a_lost_card_is_opened_again(library: FakeLibrary) -> None:
    cards = CudaBackend([], DeviceOptions())
    lost, _ = cards.devices()
    library.lose(0)
    with pytest.raises(DeviceLost):
        lost.memory()
    with pytest.raises(DeviceLost, match=r"^device CUDA0 is lost: (?!device)"):
        cards.reconnect(lost)
    library.repair(0)
    again = cards.reconnect(lost)
    assert again.name == "CUDA0" and again.memory()[1] == library.cards[0].total_bytes
