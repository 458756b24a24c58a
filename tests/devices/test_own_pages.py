"""Memory of the process alone, and large pages where all of it is used."""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from running import new

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.memory import CpuBuffer
from llamado.gguf.pages import LARGE, own_pages
from llamado.gguf.reader import GGUFFile

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
def test_a_file_that_is_read_lies_in_large_pages(tmp_path: Path) -> None:
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
def test_what_is_written_whole_gets_large_pages_and_what_may_stay_empty_does_not(best: CpuDevice) -> None:
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
    assert not own_pages(10)[:].strip(b"\0")
