"""Large pages, where all of a memory is used."""

from __future__ import annotations

import io
import mmap
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from running import new

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.limits import MachineMemory
from llamado.gguf import pages
from llamado.gguf.pages import LARGE, STEP, allocate_pages, write_in_steps
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType

linux = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or sys.platform != "linux", reason="no large pages here"
)


def kinds(address: int) -> set[str]:
    """The kernel's flags of the memory around an address: "hg" where large pages were asked for, "sh" if shared."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


@linux
def test_a_file_read_into_memory_gets_large_pages(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", np.arange(3 * LARGE // 4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    told: list[tuple[int, int]] = []
    with (
        GGUFFile.open(tmp_path / "m.gguf") as mapped,
        GGUFFile.open(tmp_path / "m.gguf", mmap=False, progress=lambda *share: told.append(share)) as read,
    ):
        assert read.data("w").tobytes() == mapped.data("w").tobytes()
        assert told[-1] == (read.file_bytes, read.file_bytes)
        assert "hg" in (flags := kinds(read.data("w").ctypes.data)) and "sh" not in flags
        assert "hg" not in kinds(mapped.data("w").ctypes.data)


@linux
def test_fully_written_buffers_get_large_pages_and_sparse_ones_do_not(best: CpuDevice) -> None:
    buffer = best.alloc(4 * LARGE)
    assert not kinds(buffer.address) & {"hg", "sh"}
    x = new(2 * LARGE // 4)
    x.buffer, x.offset = buffer, LARGE // 2
    best.write(x, np.ones(2 * LARGE // 4, np.float32))
    assert "hg" in kinds(buffer.address + LARGE)
    assert "hg" not in kinds(buffer.address) and "hg" not in kinds(buffer.address + 3 * LARGE)
    assert buffer.memory[: LARGE // 2].max() == 0 and buffer.memory[LARGE // 2 : 5 * LARGE // 2].min() >= 0
    small, long = new(1 << 20), new(16 << 20)
    best.place([small, long])
    assert "hg" in kinds(long.buffer.address + long.offset + LARGE) and "hg" not in kinds(small.buffer.address)


def test_pages_given_back_are_zeros() -> None:
    buffer = CpuBuffer.allocate(3 * LARGE)
    buffer.expect_all(0, 3 * LARGE)
    buffer.memory[:] = 7
    buffer.discard(LARGE + 1)
    assert buffer.memory[: LARGE + 1].min() == 7 and buffer.memory[-1] == 0 == buffer.memory[2 * LARGE]
    assert not allocate_pages(10)[:].strip(b"\0")


@pytest.mark.slow
@linux
def test_mapped_weights_get_large_pages_where_aligned(
    best: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gaps between two weights do not divide the mapping; pages far from any weight stay as they are."""
    (tmp_path / "m").write_bytes(bytes(8 * LARGE))
    file = np.memmap(tmp_path / "m", np.uint8, "r")
    places = [(100, LARGE), (100 + LARGE, 4), (LARGE + 5000, LARGE), (6 * LARGE, 4096)]
    weights = []
    for at, size in places:
        tensor = new(size // 4, type=TensorType.F32)
        weights.append((tensor, file[at : at + size]))
    with monkeypatch.context() as patch:
        patch.setattr("llamado.devices.limits.memory", lambda: MachineMemory(LARGE, 64 * LARGE, None))
        best.load(weights)
    assert "hg" not in kinds(file.ctypes.data + LARGE)
    best.load(weights)
    flags = [kinds(file.ctypes.data + at) for at in (0, LARGE, 2 * LARGE, 3 * LARGE, 6 * LARGE)]
    assert ["hg" in found for found in flags] == [True, True, True, False, False]


class Written(io.RawIOBase):
    """Takes note of where the system is given what."""

    def __init__(self, at: int) -> None:
        self.at, self.calls, self.data = at, [], b""

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.at

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]
        self.calls.append((self.at, len(piece)))
        self.at += len(piece)
        self.data += piece
        return len(piece)


@pytest.mark.parametrize("at", [0, 100])
def test_files_are_written_in_whole_steps(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    step = 4 * mmap.PAGESIZE
    monkeypatch.setattr(pages, "STEP", step)
    raw, data = Written(at), np.random.default_rng(0).bytes(20 * step)
    stream = io.BufferedWriter(raw, step)
    done = 0
    for n in (1, 10, step - 11, step, 3 * step + 7, 5, 0, 2 * step, 4000):
        write_in_steps(stream, memoryview(data)[done : done + n])
        done += n
    stream.flush()
    assert raw.data == data[:done]
    first, *others = raw.calls
    assert sum(first) == step
    assert [start % step for start, _ in others] == [0] * len(others)
    assert {n for _, n in others[:-1]} == {step} and others[-1][1] <= step
    assert STEP % LARGE == 0
