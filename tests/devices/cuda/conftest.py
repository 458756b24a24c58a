"""A card of the stand-in library, and its kernel."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cuda.add_kernel import add
from cuda.fake_libcuda import FakeLibrary
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cuda.driver import Card, Driver, Function


@pytest.fixture
def library() -> FakeLibrary:
    """A machine with one card."""
    return FakeLibrary(add)


@pytest.fixture
def card(library: FakeLibrary) -> Iterator[Card]:
    """The card, open."""
    opened = Driver(library).open(0)
    yield opened
    opened.close()


@pytest.fixture
def kernel(card: Card) -> Function:
    """The kernel, in blocks of four threads."""
    return card.load(b"kernels").function("add", 4)


@pytest.fixture(scope="session")
def cpu(best: CpuDevice) -> CpuDevice:
    """The CPU device, whose bits a card must have."""
    return best
