"""The driver API on a real card; skipped on machines without one."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from llamado.devices.cuda.api import CudaError, NoDriver
from llamado.devices.cuda.driver import Card, Driver, Event, Function, Stream
from llamado.devices.cuda.graphs import Launch, LaunchSequence
from llamado.devices.cuda.memory import STAGING, CudaBuffer, Transfers
from llamado.devices.cuda.nvml import Nvml
from llamado.devices.device import DeviceFull

pytestmark = pytest.mark.full

GUARD = 60.0

ADD = b"""
.version 7.8
.target sm_75
.address_size 64

// numbers[(blockIdx.y * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x] += value
.visible .entry add(.param .u64 numbers, .param .u64 value)
{
    .reg .b32 %r<8>;
    .reg .b64 %d<6>;
    mov.u32 %r1, %ctaid.y;
    mov.u32 %r2, %nctaid.x;
    mov.u32 %r3, %ctaid.x;
    mad.lo.s32 %r4, %r1, %r2, %r3;
    mov.u32 %r5, %ntid.x;
    mov.u32 %r6, %tid.x;
    mad.lo.s32 %r7, %r4, %r5, %r6;
    ld.param.u64 %d1, [numbers];
    ld.param.u64 %d2, [value];
    mul.wide.u32 %d3, %r7, 8;
    add.s64 %d4, %d1, %d3;
    ld.global.u64 %d5, [%d4];
    add.s64 %d5, %d5, %d2;
    st.global.u64 [%d4], %d5;
    ret;
}
"""

CHAINED = ADD.replace(b"sm_75", b"sm_90").replace(
    b"mov.u32 %r1, %ctaid.y;", b"griddepcontrol.wait;\n    mov.u32 %r1, %ctaid.y;"
)


@pytest.fixture(scope="module")
def driver() -> Driver:
    try:
        return Driver()
    except NoDriver as error:
        pytest.skip(f"no card: {error}")


@pytest.fixture(scope="module")
def card(driver: Driver) -> Iterator[Card]:
    opened = driver.open(0)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def transfers(card: Card) -> Iterator[Transfers]:
    made = Transfers(card)
    yield made
    made.close()


@pytest.fixture(scope="module")
def kernel(card: Card) -> Function:
    return card.load(ADD).function("add", 128)


def numbers(transfers: Transfers, buffer: CudaBuffer) -> list[int]:
    """Return the different numbers in a buffer."""
    return np.unique(transfers.read(buffer.address, buffer.size).result(GUARD).view(np.uint64)).tolist()


def test_properties(driver: Driver, card: Card) -> None:
    found = driver.properties(0)
    assert found.name and found.total_bytes > 1 << 30 and found.capability >= (5, 0)
    assert found.processors > 0 and found.shared_bytes >= 48 << 10 and found.warp == 32
    assert len(found.pci) == 12 and len(found.uuid) == 40
    free, total = card.memory()
    assert 0 < free < total <= found.total_bytes
    nvml = Nvml.open()
    if nvml is not None and (utilization := nvml.utilization(found.pci)) is not None:
        assert 0 <= utilization <= 1


def test_transfers(card: Card, transfers: Transfers) -> None:
    buffer = CudaBuffer(card, 3 * STAGING + 1000)
    assert not transfers.read(buffer.address, buffer.size).result(GUARD).any()
    data = np.random.default_rng(0).integers(0, 256, buffer.size, dtype=np.uint8)
    transfers.write(buffer.address, data)
    assert (transfers.read(buffer.address, buffer.size).result(GUARD) == data).all()  # too large for the ring
    spans = [(7 * i, 1000 + i) for i in range(50)]
    reads = [transfers.read(buffer.address + at, n) for at, n in spans]
    for (at, n), read in zip(spans, reads, strict=True):
        assert (read.result(GUARD) == data[at : at + n]).all()
    for shift in (-1 << 20, 3, 1 << 20):
        card.copy(buffer.address + (1 << 20) + shift, buffer.address + (1 << 20), 20 << 20)
        data[(1 << 20) + shift :][: 20 << 20] = data[1 << 20 :][: 20 << 20].copy()
    assert (transfers.read(buffer.address, buffer.size).result(GUARD) == data).all()
    buffer.free()


def test_reads_and_kernels_are_in_order(card: Card, transfers: Transfers, kernel: Function) -> None:
    buffer = CudaBuffer(card, 8 * 128 * 6000)
    reads = []
    for _ in range(20):
        card.launch(kernel, (3000, 2), (buffer.address, 3))
        reads.append(transfers.read(buffer.address, 8))
        transfers.write(buffer.address, np.zeros(1, np.uint64))
    assert [int(read.result(GUARD).view(np.uint64)[0]) for read in reads] == [3] * 20
    card.launch(kernel, (3000, 2), (buffer.address, -1))
    assert numbers(transfers, buffer) == [59, 2**64 - 1]
    buffer.free()


def test_cubins(card: Card, transfers: Transfers) -> None:
    cubin = card.link(ADD)
    assert cubin.startswith(b"\x7fELF")
    module = card.load(cubin)
    function = module.function("add", 64, 60 << 10 if card.properties.shared_bytes > 60 << 10 else 0)
    assert 0 < function.registers < 64 and function.local_bytes == 0
    buffer = CudaBuffer(card, 8 * 64 * 10)
    card.launch(function, (5, 2), (buffer.address, 1 << 40))
    assert numbers(transfers, buffer) == [1 << 40]
    module.unload()
    buffer.free()
    for make in (card.link, card.load):
        with pytest.raises(CudaError, match=r"CUDA_ERROR_INVALID_PTX.*ptxas"):
            make(ADD.replace(b"mul.wide.u32", b"no.such.instruction"))
    with pytest.raises(CudaError, match="CUDA_ERROR_NOT_FOUND"):
        card.load(ADD).function("subtract", 1)


@pytest.mark.parametrize("chained", [False, True])
def test_graphs(card: Card, transfers: Transfers, kernel: Function, chained: bool) -> None:
    if chained and not card.can_chain:
        pytest.skip("this card cannot chain kernels")
    function = card.load(CHAINED).function("add", 128) if chained else kernel
    buffer = CudaBuffer(card, 8 * 128 * 100)
    sequence = LaunchSequence(card, [Launch(function, (50, 2), (buffer.address, 1), chained)] * 200)
    for _ in range(50):
        sequence.run()
    assert numbers(transfers, buffer) == [10_000]
    assert sequence._graph is not None
    sequence.free()
    buffer.free()


def test_other_threads_work_during_a_capture(card: Card, transfers: Transfers, kernel: Function) -> None:
    """`place` and reads run in other threads while a graph is captured."""
    buffer = CudaBuffer(card, 1024)
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            other = CudaBuffer(card, 1 << 20)
            assert not transfers.read(other.address, 100).result(GUARD).any()
            other.free()
            card.load(ADD).function("add", 32)
        except BaseException as error:
            failures.append(error)

    def work(stream: Stream) -> None:
        card.launch(kernel, (1, 1), (buffer.address, 1), stream=stream)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join(GUARD)
        card.launch(kernel, (1, 1), (buffer.address, 1), stream=stream)

    card.launch(kernel, (1, 1), (buffer.address, 1))
    card.stream.synchronize()
    graph = card.capture(work)
    assert not failures
    graph.launch()
    assert numbers(transfers, buffer) == [3]
    graph.free()
    buffer.free()


def test_events(card: Card, kernel: Function) -> None:
    buffer = CudaBuffer(card, 8 * 128 * 100_000)
    other, start, end = Stream(card), Event(card, timed=True), Event(card, timed=True)
    start.record()
    card.launch(kernel, (50_000, 2), (buffer.address, 1))
    middle = Event(card)
    middle.record()
    other.wait(middle)
    card.launch(kernel, (50_000, 2), (buffer.address, 1), stream=other)
    end.record(other)
    end.synchronize()
    assert end.query() and end.seconds_since(start) > 0
    buffer.free()


def test_full_cards_refuse(card: Card) -> None:
    with pytest.raises(DeviceFull, match="has no room"):
        CudaBuffer(card, 2 * card.properties.total_bytes)
    assert card.lost is None
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        card.zero(np.zeros(8).ctypes.data, 8)


LOSS = """
import sys
from test_cuda_card import ADD
from llamado.devices.cuda.driver import Driver
from llamado.devices.device import DeviceLost

driver = Driver()
card = driver.open(0)
card.launch(card.load(ADD).function("add", 32), (1, 1), (8, 1))
try:
    card.stream.synchronize()
    sys.exit("no error")
except DeviceLost as error:
    print(error)
card.close()
try:
    card = driver.open(0)
    print("opened again", card.memory())
except DeviceLost as error:
    print("not opened again:", error)
"""


def test_a_bad_address_loses_the_card(driver: Driver) -> None:
    """A child process runs it: the context of the card is unusable afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", LOSS], capture_output=True, text=True, timeout=GUARD, cwd=__file__.rpartition("/")[0]
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    assert "CUDA0 is lost: cuStreamSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in done.stdout
    assert "opened again" in done.stdout
