"""A machine with fake cards: `install` makes the back end find them, and as a program this file is `llamado` there.

python tests/devices/cuda/fake_machine.py bench -m MODEL --device CUDA0
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(folder) for folder in Path(__file__).parents[2::-1]]

from cuda.cards import run
from cuda.fake_libcuda import FakeCard, FakeLibrary
from llamado.devices.cuda import driver, jit
from llamado.devices.cuda.lowerings.emulated import EmulatedImages

IMAGES = EmulatedImages()
"""Kernels that were recorded for any card of this process."""

_DRIVER = driver.Driver

Replace = Callable[[Any, str, Any], None]


def small_card() -> FakeCard:
    """A card with room for small models. Its memory takes little of the address space, of which kernels of the CPU need
    parts that are close to each other.
    """
    return FakeCard(total_bytes=64 << 20, processors=2)


def install(*cards: FakeCard, replace: Replace = setattr) -> FakeLibrary:
    """Make fake cards the cards of this process. `replace`: sets an attribute, as `monkeypatch.setattr` does."""
    library = FakeLibrary(run, cards)
    replace(driver, "Driver", lambda: _DRIVER(library))
    replace(jit, "PtxImages", lambda card: IMAGES)
    return library


if __name__ == "__main__":
    from llamado.__main__ import main

    install(small_card())
    sys.exit(main())
