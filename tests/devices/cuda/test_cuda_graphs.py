"""Sequences of launches: plain at first, then as a CUDA graph."""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import pytest

from cuda.add_kernel import add
from cuda.fake_libcuda import FakeCard, FakeLibrary
from llamado.devices.cuda.api import CudaError
from llamado.devices.cuda.driver import Card, Driver, Function, Stream
from llamado.devices.cuda.graphs import Launch, LaunchSequence
from llamado.devices.cuda.memory import CudaBuffer
from llamado.devices.device import DeviceLost


def value(card: Card, buffer: CudaBuffer) -> int:
    """Return the number in a buffer, once all work is done."""
    data = np.empty(1, np.uint64)
    card.download(buffer.address, data)
    card.stream.synchronize()
    return int(data[0])


def launches(kernel: Function, buffer: CudaBuffer, n: int = 3) -> list[Launch]:
    """Return launches that add 1, 2, 4, …"""
    return [Launch(kernel, (1, 1), (buffer.address, 1 << i), chained=i > 0) for i in range(n)]


def test_the_second_run_makes_a_graph(card: Card, kernel: Function, library: FakeLibrary) -> None:
    buffer = CudaBuffer(card, 32)
    sequence = LaunchSequence(card, launches(kernel, buffer))
    sequence.run()
    assert (library.calls["cuLaunchKernelEx"], library.calls["cuStreamBeginCapture_v2"]) == (3, 0)
    assert value(card, buffer) == 7
    for runs in (2, 3, 4):
        sequence.run()
        assert value(card, buffer) == 7 * runs
    assert library.calls["cuLaunchKernelEx"] == 6
    assert (library.calls["cuStreamBeginCapture_v2"], library.calls["cuGraphLaunch"]) == (1, 3)
    assert [launch.chained for launch in library.launches] == [False, True, True] * 4
    sequence.free()
    sequence.free()
    assert library.calls["cuGraphExecDestroy"] == library.calls["cuGraphDestroy"] == 1
    sequence.run()
    assert value(card, buffer) == 35


def test_runs_need_not_wait_for_each_other(card: Card, kernel: Function) -> None:
    buffer = CudaBuffer(card, 32)
    sequence = LaunchSequence(card, launches(kernel, buffer))
    for _ in range(5):
        sequence.run()
    assert value(card, buffer) == 35


def test_few_launches_are_no_graph(card: Card, kernel: Function, library: FakeLibrary) -> None:
    buffer = CudaBuffer(card, 32)
    sequence = LaunchSequence(card, launches(kernel, buffer, 2))
    for _ in range(3):
        sequence.run()
    assert value(card, buffer) == 9
    assert not library.calls["cuStreamBeginCapture_v2"]


def test_refused_graphs_are_launched_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    library = FakeLibrary(add, captures=False)
    card = Driver(library).open(0)
    kernel = card.load(b"kernels").function("add", 4)
    buffer = CudaBuffer(card, 32)
    with caplog.at_level(logging.WARNING, "llamado.devices"):
        for i in (1, 2):
            sequence = LaunchSequence(card, launches(kernel, buffer))
            for _ in range(3):
                sequence.run()
            assert value(card, buffer) == 21 * i
    (message,) = caplog.messages
    assert message.startswith("CUDA0: no CUDA graphs") and "NOT_SUPPORTED" in message
    assert library.calls["cuStreamDestroy_v2"] == 2  # those of the captures


def test_a_lost_card_is_no_refusal(
    card: Card, kernel: Function, library: FakeLibrary, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = CudaBuffer(card, 32)
    sequence = LaunchSequence(card, launches(kernel, buffer))
    sequence.run()
    library.lose(0, after=3)
    with pytest.raises(DeviceLost):
        sequence.run()
    assert not caplog.messages
    sequence.free()


def test_errors_while_capturing_end_the_capture(card: Card, kernel: Function, library: FakeLibrary) -> None:
    buffer = CudaBuffer(card, 32)
    card.launch(kernel, (1, 1), (buffer.address, 1))

    def fail(stream: Stream) -> None:
        card.launch(kernel, (1, 1), (buffer.address, 1), stream=stream)
        raise KeyError("work")

    with pytest.raises(KeyError):
        card.capture(fail)
    for work in (
        lambda stream: card.allocate(10),
        lambda stream: card.launch(card.load(b"new").function("add", 4), (1, 1), (buffer.address, 1), stream=stream),
    ):
        with pytest.raises(CudaError, match="STREAM_CAPTURE_UNSUPPORTED"):
            card.capture(work)
    graph = card.capture(lambda stream: card.launch(kernel, (1, 1), (buffer.address, 8), stream=stream))
    graph.launch()
    assert value(card, buffer) == 9
    live = Counter(library.calls)
    assert live["cuStreamCreate"] == live["cuStreamDestroy_v2"] + 1


def test_a_kernel_is_not_loaded_during_a_capture(card: Card, kernel: Function) -> None:
    """The stand-in refuses it, as drivers do that load kernels lazily."""
    buffer = CudaBuffer(card, 32)
    with pytest.raises(CudaError, match="STREAM_CAPTURE_UNSUPPORTED"):
        card.capture(lambda stream: card.launch(kernel, (1, 1), (buffer.address, 1), stream=stream))


def test_older_cards_do_not_chain() -> None:
    library = FakeLibrary(add, [FakeCard(capability=(7, 5))])
    card = Driver(library).open(0)
    kernel = card.load(b"kernels").function("add", 4)
    buffer = CudaBuffer(card, 32)
    sequence = LaunchSequence(card, launches(kernel, buffer))
    for _ in range(3):
        sequence.run()
    assert value(card, buffer) == 21
    assert not any(launch.chained for launch in library.launches)
