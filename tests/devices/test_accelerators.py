"""The accelerators of this machine: kinds, names, what is opened, and cards as the operating system lists them."""

from __future__ import annotations

from pathlib import Path

import pytest
from own_device import OwnDevice, Place
from stand_in_cards import Cards, install

from llamado.devices import accelerators
from llamado.devices.accelerators import Accelerators, accelerator_kinds, kind_of
from llamado.devices.cards import Card, cards, has_card
from llamado.devices.device import DeviceLost


def test_names_of_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Cards())
    assert accelerator_kinds() == ("cuda",)
    assert kind_of("CUDA0") == kind_of("cuda12") == "cuda"
    assert {kind_of(name) for name in ("CPU", "none", "RPC0[h:1]", "CUDA0[h:1]", "")} == {None}


def test_only_named_cards_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = install(monkeypatch, Cards((1, 2, 3)))
    every = Accelerators()
    assert [device.name for device in every.devices] == ["CUDA0", "CUDA1", "CUDA2"]
    assert [device.name for device in every.take()] == ["CUDA0", "CUDA1", "CUDA2"] and every.devices == []
    some = Accelerators(names=["CPU", "cuda1", "CUDA9"])
    assert [device.name for device in some.devices] == ["CUDA1"]
    assert [card.closed for card in machine.opened[3:]] == [True, False, True]
    some.close()
    assert machine.opened[4].closed and not machine.opened[0].closed
    n = len(machine.opened)
    assert Accelerators.none().devices == Accelerators(names=["CPU", "none"]).devices == []
    assert len(machine.opened) == n, "the driver is not even loaded"


@pytest.mark.parametrize("present", [False, True])
def test_a_card_that_cannot_be_used_is_worth_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, present: bool
) -> None:
    """Most machines have no card."""
    install(monkeypatch, Cards(problem="there is no driver: install it"))
    monkeypatch.setattr(accelerators, "has_card", lambda kind: present)
    found = Accelerators()
    assert found.devices == [] and str(found.problems["cuda"]) == "there is no driver: install it"
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == (["CUDA: not used: there is no driver: install it"] if present else [])


def test_a_lost_card_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = install(monkeypatch, Cards((1, 2)))
    found = Accelerators()
    lost = found.devices[1]
    lost.close()
    again = found.reconnect(lost, 1.0)
    assert again is machine.opened[-1] and again.name == "CUDA1"
    machine.away.add("CUDA1")
    again.close()
    with pytest.raises(DeviceLost, match="device CUDA1 is lost: the driver does not list it"):
        found.reconnect(again, 1.0)
    with pytest.raises(DeviceLost, match="no device of this machine"):
        found.reconnect(OwnDevice("RPC0[h:1]", Place("h")), 1.0)
    with pytest.raises(DeviceLost, match="no device of this machine"):
        Accelerators.none().reconnect(again, 1.0)


def pci(root: Path, address: str, vendor: str, kind: str, driver: str = "") -> None:
    """Write a PCI device as Linux lists it."""
    folder = root / "sys/bus/pci/devices" / address
    folder.mkdir(parents=True)
    for name, text in (("vendor", vendor), ("class", kind), ("device", "0x2335")):
        (folder / name).write_text(f"{text}\n")
    if driver:
        module = root / "sys/bus/pci/drivers" / driver
        module.mkdir(parents=True, exist_ok=True)
        (folder / "driver").symlink_to(module)


def test_cards_as_linux_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert cards("cuda", tmp_path) == [] and not has_card("cuda", tmp_path)
    pci(tmp_path, "0000:00:1f.0", "0x8086", "0x060100")
    pci(tmp_path, "0000:02:00.0", "0x1002", "0x030000")
    pci(tmp_path, "0000:01:00.1", "0x10de", "0x040300")  # the sound of a card
    assert cards("cuda", tmp_path) == []
    pci(tmp_path, "0000:01:00.0", "0x10de", "0x030000", "nouveau")
    pci(tmp_path, "0000:03:00.0", "0x10de", "0x030200")
    assert cards("cuda", tmp_path) == [Card("0000:01:00.0", "0x2335", "nouveau"), Card("0000:03:00.0", "0x2335", "")]
    assert has_card("cuda", tmp_path) and cards("other", tmp_path) == [] and not has_card("other", tmp_path)
    for hiding in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hiding)
        assert not has_card("cuda", tmp_path) and cards("cuda", tmp_path), "a line about them would be noise"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert has_card("cuda", tmp_path)


def test_a_container_shows_device_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert not has_card("cuda", tmp_path)
    (tmp_path / "dev/nvidia0").touch()
    assert has_card("cuda", tmp_path) and cards("cuda", tmp_path) == []
