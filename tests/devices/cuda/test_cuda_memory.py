"""Buffers of a card, and copies between it and the host."""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import pytest

from cuda.add_kernel import add
from cuda.fake_libcuda import FakeCard, FakeLibrary
from llamado.devices.cuda import memory
from llamado.devices.cuda.api import CudaError
from llamado.devices.cuda.driver import Card, Driver, Function
from llamado.devices.cuda.memory import CudaBuffer, Transfers, _Ring
from llamado.devices.device import Buffer, Bytes, DeviceFull, DeviceLost

GUARD = 60.0
"""Seconds after which a read that does not end fails its test."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little pinned memory, so that few bytes go around it."""
    monkeypatch.setattr(memory, "STAGING", 1024)
    monkeypatch.setattr(memory, "READS", 2048)


def numbers(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)


def test_buffers_are_zeroed_memory(card: Card, library: FakeLibrary) -> None:
    buffer: Buffer = CudaBuffer(card, 100)
    assert isinstance(buffer, CudaBuffer)
    assert buffer.size == 100 and buffer.memory is None and buffer.lock() and buffer.address % 256 == 0
    card.stream.synchronize()
    fake = library.cards[0].memory
    assert not fake.view(buffer.address, 100 + 64).any()  # kernels load more than they use
    buffer.free()
    assert card.memory()[0] == card.properties.total_bytes
    assert (buffer.size, buffer.address) == (0, 0)
    buffer.free()
    empty = CudaBuffer(card, 0)
    assert (empty.size, empty.address) == (0, 0)
    empty.free()


def test_buffers_that_do_not_fit_are_refused() -> None:
    card = Driver(FakeLibrary(add, [FakeCard(total_bytes=1000)])).open(0)
    buffer = CudaBuffer(card, 900)
    with pytest.raises(DeviceFull, match="CUDA0 has no room"):
        CudaBuffer(card, 100)
    buffer.free()
    CudaBuffer(card, 100)


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 1025, 5000])
def test_writes_of_any_size(card: Card, small: None, n: int) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 2 * n)
    counts: list[int] = []
    data = numbers(n)
    for at in (0, n):  # the second begins inside a staging buffer
        given = data.copy()
        transfers.write(buffer.address + at, given, counts.append)
        given[:] = 0  # allowed once the call has returned
    assert sum(counts) == 2 * n
    assert all(count <= 1024 for count in counts)
    assert transfers.read(buffer.address, 2 * n).result(GUARD).tolist() == [*data, *data]
    transfers.close()


def test_writes_of_arrays_with_gaps(card: Card) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 64)
    data = np.arange(32, dtype=np.float32).reshape(8, 4)[:, ::2]
    transfers.write(buffer.address, data)
    assert transfers.read(buffer.address, 64).result(GUARD).view(np.float32).tolist() == data.reshape(-1).tolist()
    transfers.close()


def test_a_staging_buffer_is_filled_while_the_other_is_copied(card: Card, library: FakeLibrary, small: None) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 8192)
    before = library.calls["cuMemcpyHtoDAsync_v2"]
    transfers.write(buffer.address, numbers(2048))
    stream = library.cards[0].streams[0]
    assert library.calls["cuMemcpyHtoDAsync_v2"] == before + 2
    assert len(stream.queue) == 3  # with the zeros: the card was not waited for
    transfers.write(buffer.address, numbers(1))
    assert len(stream.queue) == 2  # only for the buffer that is used again
    transfers.close()


def test_reads_are_of_their_place_in_the_stream(card: Card, kernel: Function, library: FakeLibrary) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 32)
    reads = []
    with library.paused():  # nothing is waited for meanwhile
        for _ in range(5):
            reads.append(transfers.read(buffer.address, 32))
            card.launch(kernel, (1, 1), (buffer.address, 3))
        assert not any(read.done() for read in reads)
    found = [read.result(GUARD).view(np.uint64).tolist() for read in reads]
    assert found == [[3 * i] * 4 for i in range(5)]
    transfers.close()


def test_reads_call_back(card: Card) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 32)
    called = threading.Event()
    transfers.read(buffer.address, 8).add_done_callback(lambda done: called.set())
    assert called.wait(GUARD)
    transfers.close()


def test_results_of_reads_are_not_overwritten(card: Card, library: FakeLibrary, small: None) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 10_000)
    data = numbers(10_000)
    transfers.write(buffer.address, data)
    found = []
    for at in range(0, 8000, 1000):
        spans = [(at, 0), (at + 1, 700), (at + 5, 700), (at + 9, 700), (at, 2048), (40, 300), (at, 2049), (77, 1)]
        reads = [transfers.read(buffer.address + start, n) for start, n in spans]
        found += [(start, n, read.result(GUARD)) for (start, n), read in zip(spans, reads, strict=True)]
    for start, n, result in found:
        assert result.tolist() == data[start : start + n].tolist()
    with library.paused():
        assert not transfers.read(buffer.address, 2048).done()  # all pinned memory is free again
    transfers.close()


def test_pinned_memory_of_reads_goes_around(card: Card, small: None) -> None:
    ring, rng = _Ring(card), np.random.default_rng(0)
    taken: deque[tuple[Bytes, int]] = deque()
    refused = wrapped = 0
    for tag in range(500):
        n = int(rng.integers(1, 1200))
        span = ring.take(n)
        if span is None:
            refused += 1
        else:
            assert span.size == n
            wrapped += bool(taken) and span.ctypes.data < taken[-1][0].ctypes.data
            span[:] = tag % 256
            taken.append((span, tag % 256))
        if taken and (span is None or rng.random() < 0.3):
            oldest, value = taken.popleft()
            assert (oldest == value).all()
            ring.release()
    assert refused > 50 and wrapped > 50
    assert ring.take(2049) is None
    ring.free()


def test_reads_without_room_wait_for_the_card(card: Card, library: FakeLibrary, small: None) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 4096)
    data = numbers(4096)
    transfers.write(buffer.address, data)
    with library.paused():
        first = transfers.read(buffer.address, 1800)
        second = transfers.read(buffer.address, 1000)
        assert not first.done() and second.done()
    assert (second.result() == data[:1000]).all()
    assert (first.result(GUARD) == data[:1800]).all()
    assert transfers.read(buffer.address, 2049).done()
    transfers.close()


def test_reads_of_a_lost_card_fail(card: Card, library: FakeLibrary) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 32)
    with library.paused():
        read = transfers.read(buffer.address, 32)
        library.lose(0)
    with pytest.raises(DeviceLost, match="CUDA0 is lost"):
        read.result(GUARD)
    with pytest.raises(DeviceLost, match="CUDA0 is lost"):
        transfers.read(buffer.address, 32).result(GUARD)
    with pytest.raises(DeviceLost, match="CUDA0 is lost"):
        transfers.write(buffer.address, numbers(32))
    buffer.free()
    transfers.close()


def test_bad_addresses_fail_their_read_alone(card: Card) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 32)
    bad = transfers.read(buffer.address + 8192, 32)
    good = transfers.read(buffer.address, 32)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        bad.result(GUARD)
    assert not good.result(GUARD).any()
    transfers.close()


def test_close_completes_reads_and_releases_everything(card: Card, library: FakeLibrary) -> None:
    transfers, buffer = Transfers(card), CudaBuffer(card, 32)
    transfers.write(buffer.address, numbers(32))
    with library.paused():
        read = transfers.read(buffer.address, 32)
        assert not read.done()
    transfers.close()
    assert read.done()
    assert library.pinned_bytes == 0
    assert library.calls["cuEventDestroy_v2"] == library.calls["cuEventCreate"]
    transfers.close()
