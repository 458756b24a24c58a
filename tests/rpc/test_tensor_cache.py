"""The cache of weights on disk: llama.cpp's layout, whole files or none, and nothing wrong is ever used."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from llamado.devices.cpu.device import CpuDevice
from llamado.rpc.hashing import fnv1a
from llamado.rpc.regions import Lender, Region
from llamado.rpc.tensor_cache import CacheError, TensorCache, Wanted, cache_folder


class HostMemory:
    """What a Lender needs of a device that only holds memory."""

    name = "host"
    place = CpuDevice.place
    alloc = CpuDevice.alloc

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30


@pytest.fixture
def lender() -> Lender:
    return Lender(HostMemory(), None)  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "rpc")


def region_of(lender: Lender, size: int) -> Region:
    region = lender.lend(size)
    assert region is not None
    return region


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def fnv(data: bytes) -> int:
    """FNV-1a as its definition says."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def kept(cache: TensorCache, lender: Lender, data: bytes) -> int:
    """Puts data into the cache the way an upload does; gives its hash."""
    region = region_of(lender, len(data) + 100)
    region.write(100, data)
    cache.keep(region, 100, len(data))
    cache.flush()
    region.free()
    return fnv1a(np.frombuffer(data, np.uint8))


def load(cache: TensorCache, lender: Lender, hash: int, room: int) -> bytes | None:
    region = region_of(lender, room + 64)
    (hit,) = cache.load([Wanted(hash, region, 32, room)])
    assert region.memory is not None
    return bytes(region.memory[32 : 32 + room]) if hit else None


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"LLAMA_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/rpc"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/llama.cpp/rpc"),
        ({"HOME": "/home/x"}, "/home/x/.cache/llama.cpp/rpc"),
    ],
)
def test_folder(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str) -> None:
    for name in ("LLAMA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", "linux")
    assert cache_folder() == Path(folder)


def test_layout_is_llama_cpps(cache: TensorCache, lender: Lender) -> None:
    """A file named by 16 hex digits of the hash, with the data and nothing else."""
    data = noise(10_000)
    kept(cache, lender, data)
    (file,) = cache.folder.iterdir()
    assert file.name == f"{fnv(data):016x}"
    assert file.read_bytes() == data


def test_small_hashes_have_leading_zeros(cache: TensorCache) -> None:
    assert cache.path(0x1A).name == "000000000000001a"


def test_what_was_kept_comes_back(cache: TensorCache, lender: Lender) -> None:
    data = noise(9 << 20)  # several chunks and a rest
    assert load(cache, lender, kept(cache, lender, data), len(data)) == data


def test_another_process_finds_it(cache: TensorCache, lender: Lender) -> None:
    data = noise(5000)
    hash = kept(cache, lender, data)
    assert load(TensorCache(cache.folder), lender, hash, len(data)) == data


def test_several_are_checked_side_by_side(cache: TensorCache, lender: Lender) -> None:
    blobs = [noise(1000 * (i + 1), i) for i in range(6)]
    hashes = [kept(cache, lender, blob) for blob in blobs]
    cache.path(hashes[2]).write_bytes(noise(3000, 99))
    fresh = TensorCache(cache.folder)
    region = region_of(lender, 1 << 16)
    wanted = [Wanted(h, region, 10_000 * i, 10_000) for i, h in enumerate([*hashes, 12345])]
    assert fresh.load(wanted) == [True, True, False, True, True, True, False]
    assert region.memory is not None
    for i in (0, 1, 3, 4, 5):
        assert bytes(region.memory[10_000 * i :][: len(blobs[i])]) == blobs[i]


def test_unknown_hash(cache: TensorCache, lender: Lender) -> None:
    assert load(cache, lender, 1, 100) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_corrupt_entry_is_dropped(
    cache: TensorCache, lender: Lender, damage: str, fresh: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the file is damaged after this process has checked it."""
    data = noise(5000)
    hash = kept(cache, lender, data)
    assert load(cache, lender, hash, 5000) == data
    path = cache.path(hash)
    wrong = {"flip": data[:100] + bytes([data[100] ^ 1]) + data[101:], "cut": data[:4999], "empty": b""}[damage]
    path.write_bytes(wrong)
    os.utime(path, ns=(1, 1))
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker"):
        assert load(TensorCache(cache.folder) if fresh else cache, lender, hash, 5000) is None
    if damage != "empty":
        assert not path.exists()
        assert f"{hash:016x} is corrupt" in caplog.text
    assert kept(cache, lender, data) == hash
    assert load(cache, lender, hash, 5000) == data


def test_an_entry_larger_than_the_tensor_is_not_used(cache: TensorCache, lender: Lender) -> None:
    data = noise(5000)
    hash = kept(cache, lender, data)
    region = region_of(lender, 5000)
    assert cache.load([Wanted(hash, region, 1, 4999)]) == [False]
    assert region.memory is not None and not any(region.memory)


def test_what_a_client_frees_is_not_kept(cache: TensorCache, lender: Lender) -> None:
    region = region_of(lender, 5000)
    region.free()
    cache.keep(region, 0, 5000)
    cache.flush()
    assert list(cache.folder.iterdir()) == []


def test_what_has_changed_before_it_was_written_is_not_kept(cache: TensorCache, lender: Lender) -> None:
    region = region_of(lender, 100)
    cache.keep(region, 0, 100, 12345)
    cache.flush()
    assert list(cache.folder.iterdir()) == []
    cache.keep(region, 0, 100, fnv(bytes(100)))
    cache.flush()
    assert len(list(cache.folder.iterdir())) == 1


def test_a_full_disk_costs_only_the_entry(
    cache: TensorCache, lender: Lender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "replace", full)
        with caplog.at_level(logging.WARNING, "llamado.rpc.worker"):
            kept(cache, lender, noise(100))
        assert "No space left" in caplog.text
        assert list(cache.folder.iterdir()) == []
    kept(cache, lender, noise(100))
    assert len(list(cache.folder.iterdir())) == 1


def test_some_of_the_disk_is_left(
    cache: TensorCache, lender: Lender, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client could send new weights for ever."""
    free = shutil.disk_usage(cache.folder).free
    monkeypatch.setattr("llamado.rpc.tensor_cache._SPARE", free + (1 << 40))
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker"):
        kept(cache, lender, noise(100))
    assert "would be left on the disk" in caplog.text
    assert list(cache.folder.iterdir()) == []


def test_unfinished_files_of_the_dead_are_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "1-a.unfinished", tmp_path / "2-b.unfinished"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    TensorCache(tmp_path)
    assert not old.exists() and new.exists()


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="LLAMA_CACHE"):
        TensorCache(tmp_path / "file" / "rpc")


def test_close_writes_what_waits(cache: TensorCache, lender: Lender) -> None:
    region = region_of(lender, 100)
    cache.keep(region, 0, 100)
    cache.close()
    assert [p.name for p in cache.folder.iterdir()] == [f"{fnv(bytes(100)):016x}"]
    cache.close()


@pytest.mark.parametrize("size", [300_000, 1 << 20, (1 << 20) + 1])
def test_whole_pages_are_mapped_and_stay_the_process_s_own(cache: TensorCache, lender: Lender, size: int) -> None:
    data = noise(size)
    hash = kept(cache, lender, data)
    region = region_of(lender, size + 3 * 4096)
    region.fill(0, region.size, 0xEE)
    assert cache.load([Wanted(hash, region, 4096, size)]) == [True]
    assert region.memory is not None
    assert region.memory[:4096] == b"\xee" * 4096
    assert region.memory[4096 : 4096 + size] == data
    assert set(region.memory[4096 + size :].tobytes()) == {0xEE}  # the rest of the last page is somebody else's
    region.write(4096, b"changed")
    assert cache.path(hash).read_bytes() == data
    cache.path(hash).unlink()
    assert region.memory[4096 + 4096 : 4096 + size] == data[4096:]
    region.free()


def test_a_mapped_entry_that_is_corrupt_is_dropped(tmp_path: Path, cache: TensorCache, lender: Lender) -> None:
    data = noise(1 << 20)
    hash = kept(cache, lender, data)
    spoilt = bytearray(data)
    spoilt[777_777] ^= 1
    cache.path(hash).write_bytes(spoilt)
    region = region_of(lender, 1 << 20)
    assert TensorCache(cache.folder).load([Wanted(hash, region, 0, 1 << 20)]) == [False]
    assert not cache.path(hash).exists()
    region.write(0, data)  # what the client sends then
    assert region.memory == data
    region.free()
