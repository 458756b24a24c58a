"""Checks of graphics cards by `llamado doctor`: each symptom is provoked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from stand_in_cards import Cards, install

from llamado.cluster.doctor import cards as checks
from llamado.cluster.doctor import examination
from llamado.cluster.doctor.cards import card_users, examine_cards
from llamado.cluster.doctor.machine import MachineOptions
from llamado.cluster.doctor.symptoms import Finding
from llamado.engine.options import EngineOptions

NO_DRIVER = "this machine has no NVIDIA driver (libcuda.so.1: no such file); install it"
OLD = "the NVIDIA driver supports CUDA 11.4, and 11.8 is needed: update the driver to 520 or newer"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a machine with one NVIDIA card."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    folder = tmp_path / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    for name, text in (("vendor", "0x10de"), ("class", "0x030000"), ("device", "0x2335")):
        (folder / name).write_text(f"{text}\n")
    (tmp_path / "dev").mkdir()
    return tmp_path


def driven(root: Path, module: str) -> None:
    """Let a kernel module have the card."""
    folder = root / "sys/bus/pci/drivers" / module
    folder.mkdir(parents=True)
    (root / "sys/bus/pci/devices/0000:01:00.0/driver").symlink_to(folder)


def one(root: Path, environ: Mapping[str, str] | None = None) -> Finding:
    (found,) = examine_cards(root, environ or {})
    return found


def test_no_card_and_a_card_that_works_have_no_findings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path
) -> None:
    install(monkeypatch, Cards(problem=NO_DRIVER))
    assert examine_cards(tmp_path / "elsewhere", {}) == []
    machine = install(monkeypatch, Cards((1 << 30, 1 << 30)))
    assert examine_cards(root, {"CUDA_VISIBLE_DEVICES": "0,1"}) == []
    assert all(card.closed for card in machine.opened)


def test_a_card_without_its_driver(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    install(monkeypatch, Cards(problem=NO_DRIVER))
    found = one(root)
    assert (found.symptom, found.where) == ("card-no-driver", "0000:01:00.0")
    assert found.found == f"no kernel module has the card: {NO_DRIVER}"
    driven(root, "nouveau")
    assert one(root).found.startswith("nouveau has the card: ")


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driven(root, "nvidia")
    install(monkeypatch, Cards(problem=OLD))
    found = one(root)
    assert found.symptom == "card-old-driver" and found.found == OLD


def test_no_permission(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driven(root, "nvidia")
    for name in ("nvidiactl", "nvidia0"):
        (root / "dev" / name).touch()
    install(monkeypatch, Cards(problem="cuInit failed: no CUDA-capable device is detected"))
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("nvidia0"))
    found = one(root)
    assert found.symptom == "card-forbidden" and f"may not open {root / 'dev/nvidia0'}: cuInit" in found.found


def test_hidden_cards(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driven(root, "nvidia")
    install(monkeypatch, Cards(problem="no CUDA-capable device is detected"))
    found = one(root, {"CUDA_VISIBLE_DEVICES": ""})
    assert found.symptom == "cards-hidden" and found.found.startswith("CUDA_VISIBLE_DEVICES is '': no CUDA")


def test_other_reasons(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    driven(root, "nvidia")
    install(monkeypatch, Cards(problem="cuCtxCreate failed: all CUDA-capable devices are busy"))
    assert one(root).symptom == "card-unusable"


def test_memory_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: Path) -> None:
    """The processes are those that nvidia-smi lists, if it is there."""
    machine = install(monkeypatch, Cards((1000 << 20, 1000 << 20)))
    memory = {0: (99 << 20, 1000 << 20), 1: (101 << 20, 1000 << 20)}
    monkeypatch.setattr("stand_in_cards.Card.memory", lambda card: memory[card.number])
    monkeypatch.setenv("PATH", str(tmp_path))
    found = one(root)
    assert (found.symptom, found.where) == ("card-in-use", "CUDA0")
    assert found.found == "104 MB of 1049 are free" and card_users() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '4242, /usr/bin/python3, 900 MiB'\necho broken\n")
    program.chmod(0o755)
    assert card_users() == ["python3 (process 4242, 900 MiB)"]
    assert one(root).found.endswith("are free, used by python3 (process 4242, 900 MiB)")
    program.write_text("#!/bin/sh\nexit 9\n")
    assert card_users() == []
    assert all(card.closed for card in machine.opened)


def test_the_command_examines_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with this machine, also if a model is named."""
    found = [Finding("card-in-use", "CUDA0", "1 MB of 2 are free", "x", "y")]
    monkeypatch.setattr(examination, "examine_cards", lambda: found)
    monkeypatch.setattr(examination, "examine_machine", lambda options: [])
    seen = examination.examine(examination.Targets(), EngineOptions(), MachineOptions())
    assert seen.findings == tuple(found) and seen.exit_code == 1
    assert checks.__doc__
