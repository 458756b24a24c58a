"""Graphics cards as the operating system lists them, independent of drivers that work.

Linux lists PCI devices below /sys/bus/pci/devices (Linux Documentation/ABI/testing/sysfs-bus-pci); class 0x03 is a
display controller. Where Linux is a guest of Windows, cards are behind /dev/dxg instead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_ROOT = Path("/")
_DISPLAY = "0x03"
_VENDORS = {"cuda": "0x10de"}
"""PCI vendor of the cards of a kind of device."""


class Card(NamedTuple):
    """A graphics card. `driver`: the kernel module that has it, such as "nvidia"; empty if none has."""

    address: str
    device: str
    driver: str


def cards(kind: str, root: Path = _ROOT) -> list[Card]:
    """Return this machine's cards of a vendor, by the kind of device that would use them; empty where PCI devices are
    not listed.
    """
    found = []
    for folder in sorted(root.glob("sys/bus/pci/devices/*")):
        if _text(folder / "vendor") == _VENDORS.get(kind, "-") and _text(folder / "class").startswith(_DISPLAY):
            driver = folder / "driver"
            found.append(Card(folder.name, _text(folder / "device"), driver.resolve().name if driver.exists() else ""))
    return found


def has_card(kind: str, root: Path = _ROOT) -> bool:
    """Return True if this machine has a card of that kind, also where PCI devices are hidden, as in a container; not if
    the user hides all cards.
    """
    if kind == "cuda" and os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return bool(cards(kind, root)) or (kind == "cuda" and any(root.glob("dev/nvidia[0-9]*")))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
