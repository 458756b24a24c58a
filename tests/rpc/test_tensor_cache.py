"""The tensor cache on disk: separate for each client, whole files or none, and no corrupt bytes."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from owners import needs_other_owners
from tiers import first_of
from wire_client import running

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.memory import CpuBuffer
from llamado.devices.device import Buffer
from llamado.ggml.tensor import Tensor
from llamado.rpc.hashing import fnv1a
from llamado.rpc.worker.memory import Region, SharedDevice
from llamado.rpc.worker.weights.tensor_cache import CacheError, HashedBytes, TensorCache, cache_folder

CLIENT = "192.0.2.0_24"


class HostMemory:
    """The part of a device that SharedDevice needs, with memory only."""

    name = "host"

    def place(self, tensors: Sequence[Tensor]) -> list[Buffer]:
        (tensor,) = tensors
        tensor.buffer, tensor.offset = self.alloc(tensor.nbytes), 0
        return [tensor.buffer]

    def alloc(self, size: int) -> CpuBuffer:
        return CpuBuffer.allocate(size)

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 1 << 30


@pytest.fixture
def shared() -> SharedDevice:
    return SharedDevice(HostMemory(), None)  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path: Path) -> TensorCache:
    return TensorCache(tmp_path / "rpc")


def region_of(shared: SharedDevice, size: int) -> Region:
    region = shared.allocate(size)
    assert region is not None
    return region


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8).tobytes()


def fnv(data: bytes) -> int:
    """Return FNV-1a by its definition."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % (1 << 64)
    return value


def kept(cache: TensorCache, shared: SharedDevice, data: bytes) -> int:
    """Put data into the cache as an upload does. Returns its hash."""
    region = region_of(shared, len(data) + 100)
    region.write(100, data)
    cache.keep(CLIENT, region, 100, len(data))
    cache.flush()
    region.free()
    return fnv1a(np.frombuffer(data, np.uint8))


def load(cache: TensorCache, shared: SharedDevice, hash: int, room: int) -> bytes | None:
    region = region_of(shared, room + 64)
    (hit,) = cache.load(CLIENT, [HashedBytes(hash, region, 32, room)])
    assert region.memory is not None
    return bytes(region.memory[32 : 32 + room]) if hit else None


def entry(data: bytes, hash: int | None = None) -> bytes:
    """Return an entry's file by its definition."""
    digest = hashlib.sha256(data).digest()
    return data + b"llamado tensor 1" + struct.pack("<QQ", fnv(data) if hash is None else hash, len(data)) + digest


def test_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMADO_CACHE", "/a")
    assert cache_folder() == Path("/a/rpc")
    monkeypatch.delenv("LLAMADO_CACHE")
    monkeypatch.setenv("HOME", "/home/x")
    assert cache_folder() == Path("/home/x/.cache/llamado/rpc")


def test_layout(cache: TensorCache, shared: SharedDevice) -> None:
    """A file named by hash and size in a folder of the client, readable by this user only."""
    data = noise(10_000)
    kept(cache, shared, data)
    (file,) = cache.folder.glob("*/*")
    assert file == cache.folder / CLIENT / f"{fnv(data):016x}-10000" == cache.path(CLIENT, fnv(data), 10_000)
    assert file.read_bytes() == entry(data)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (cache.folder, file.parent)} == {0o700}


def test_small_hashes_have_leading_zeros(cache: TensorCache) -> None:
    assert cache.path(CLIENT, 0x1A, 7).name == "000000000000001a-7"


def test_a_client_finds_only_its_own_entries(cache: TensorCache, shared: SharedDevice) -> None:
    data = noise(5000)
    hash = kept(cache, shared, data)
    region = region_of(shared, 5000)
    assert cache.load("203.0.113.0_24", [HashedBytes(hash, region, 0, 5000)]) == [False]
    assert region.memory is not None and not any(region.memory)
    assert cache.load(CLIENT, [HashedBytes(hash, region, 0, 5000)]) == [True]


def test_other_bytes_of_the_same_hash(
    cache: TensorCache, shared: SharedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An intact entry stays, checked by this process or not; a corrupt one is replaced."""
    monkeypatch.setattr("llamado.rpc.worker.weights.tensor_cache.fnv1a", lambda data, start=0: 0x1A)
    genuine, forged = noise(5000, 1), noise(5000, 2)
    kept(cache, shared, genuine)
    for one in (cache, TensorCache(cache.folder)):
        with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
            kept(one, shared, forged)
        assert "other bytes with the hash of an entry" in caplog.text
        assert load(one, shared, 0x1A, 5000) == load(cache, shared, 0x1A, 5000) == genuine
        caplog.clear()
    cache.path(CLIENT, 0x1A, 5000).write_bytes(forged + entry(genuine, 0x1A)[5000:])
    kept(cache, shared, genuine)
    assert load(TensorCache(cache.folder), shared, 0x1A, 5000) == genuine


@needs_other_owners
def test_entries_that_other_users_can_write_are_not_used(
    cache: TensorCache, shared: SharedDevice, caplog: pytest.LogCaptureFixture
) -> None:
    data = noise(5000)
    hash = kept(cache, shared, data)
    path = cache.path(CLIENT, hash, 5000)
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
        os.chown(path, 4711, 4711)
        assert load(cache, shared, hash, 5000) is None
        assert "it belongs to user 4711" in caplog.text
        os.chown(path, 0, 0)
        path.chmod(0o666)
        assert load(cache, shared, hash, 5000) is None
        assert "others may write to it (mode 666)" in caplog.text
    path.chmod(0o600)
    assert load(cache, shared, hash, 5000) == data
    moved = path.rename(path.with_name("elsewhere"))
    path.symlink_to(moved)
    assert load(cache, shared, hash, 5000) is None
    cache.folder.chmod(0o777)
    with pytest.raises(CacheError, match=r"others may write to it .*\$LLAMADO_CACHE"):
        TensorCache(cache.folder)


def test_cached_bytes_are_found(cache: TensorCache, shared: SharedDevice) -> None:
    data = noise(9 << 20)  # several chunks and a rest
    assert load(cache, shared, kept(cache, shared, data), len(data)) == data


def test_another_process_finds_an_entry(cache: TensorCache, shared: SharedDevice) -> None:
    data = noise(5000)
    hash = kept(cache, shared, data)
    assert load(TensorCache(cache.folder), shared, hash, len(data)) == data


def test_entries_are_checked_in_parallel(cache: TensorCache, shared: SharedDevice) -> None:
    blobs = [noise(1000 * (i + 1), i) for i in range(6)]
    hashes = [kept(cache, shared, blob) for blob in blobs]
    cache.path(CLIENT, hashes[2], 3000).write_bytes(noise(3000, 99) + entry(blobs[2])[3000:])
    fresh = TensorCache(cache.folder)
    region = region_of(shared, 1 << 16)
    wanted = [HashedBytes(h, region, 10_000 * i, 1000 * (i + 1)) for i, h in enumerate([*hashes, 12345])]
    assert fresh.load(CLIENT, wanted) == [True, True, False, True, True, True, False]
    assert region.memory is not None
    for i in (0, 1, 3, 4, 5):
        assert bytes(region.memory[10_000 * i :][: len(blobs[i])]) == blobs[i]


def test_unknown_hash(cache: TensorCache, shared: SharedDevice) -> None:
    assert load(cache, shared, 1, 100) is None


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "bare", "longer", "mark", "renamed"])
@pytest.mark.parametrize("fresh", [True, False])
def test_a_corrupt_entry_is_dropped(
    cache: TensorCache, shared: SharedDevice, damage: str, fresh: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """This includes a file that is damaged after this process has checked it."""
    data = noise(5000)
    hash = kept(cache, shared, data)
    assert load(cache, shared, hash, 5000) == data
    path, right = cache.path(CLIENT, hash, 5000), entry(data)
    path.write_bytes({
        "flip": right[:100] + bytes([right[100] ^ 1]) + right[101:], "cut": right[:-1], "empty": b"", "bare": data,
        "longer": right + b"x", "mark": data + b"L" + right[5001:], "renamed": entry(noise(5000, 3)),
    }[damage])  # fmt: skip
    os.utime(path, ns=(1, 1))
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
        assert load(TensorCache(cache.folder) if fresh else cache, shared, hash, 5000) is None
    assert not path.exists()
    assert f"{hash:016x}-5000: corrupt, deleted" in caplog.text
    assert kept(cache, shared, data) == hash
    assert load(cache, shared, hash, 5000) == data


@pytest.mark.parametrize("size", [4999, 5001])
def test_an_entry_of_another_size_is_not_used(cache: TensorCache, shared: SharedDevice, size: int) -> None:
    data = noise(5000)
    hash = kept(cache, shared, data)
    region = region_of(shared, 6000)
    assert cache.load(CLIENT, [HashedBytes(hash, region, 1, size)]) == [False]
    assert region.memory is not None and not any(region.memory)


def test_freed_bytes_are_not_cached(cache: TensorCache, shared: SharedDevice) -> None:
    region = region_of(shared, 5000)
    region.free()
    cache.keep(CLIENT, region, 0, 5000)
    cache.flush()
    assert list(cache.folder.glob("*/*")) == []


def test_bytes_changed_before_the_write_are_not_cached(cache: TensorCache, shared: SharedDevice) -> None:
    region = region_of(shared, 100)
    cache.keep(CLIENT, region, 0, 100, 12345)
    cache.flush()
    assert list(cache.folder.glob("*/*")) == []
    cache.keep(CLIENT, region, 0, 100, fnv(bytes(100)))
    cache.flush()
    assert len(list(cache.folder.glob("*/*"))) == 1


def test_a_full_disk_costs_only_the_entry(
    cache: TensorCache, shared: SharedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(os, "link", full)
        with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
            kept(cache, shared, noise(100))
        assert "No space left" in caplog.text
        assert list(cache.folder.glob("*/*")) == []
    kept(cache, shared, noise(100))
    assert len(list(cache.folder.glob("*/*"))) == 1


def test_some_of_the_disk_is_left(
    cache: TensorCache, shared: SharedDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A client could send new weights forever."""
    free = shutil.disk_usage(cache.folder).free
    monkeypatch.setattr("llamado.rpc.worker.weights.tensor_cache._SPARE", free + (1 << 40))
    with caplog.at_level(logging.WARNING, "llamado.rpc.worker.server"):
        kept(cache, shared, noise(100))
    assert "would be left on the disk" in caplog.text
    assert list(cache.folder.glob("*/*")) == []


def test_stale_unfinished_files_are_removed(tmp_path: Path) -> None:
    (tmp_path / CLIENT).mkdir()
    old, new = tmp_path / CLIENT / "1-a.unfinished", tmp_path / CLIENT / "2-b.unfinished"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    TensorCache(tmp_path)
    assert not old.exists() and new.exists()


def test_an_unusable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="LLAMADO_CACHE"):
        TensorCache(tmp_path / "file" / "rpc")


def test_close_writes_the_queue(cache: TensorCache, shared: SharedDevice) -> None:
    region = region_of(shared, 100)
    cache.keep(CLIENT, region, 0, 100)
    cache.close()
    assert [p.name for p in cache.folder.glob("*/*")] == [f"{fnv(bytes(100)):016x}-100"]
    cache.close()


@pytest.mark.slow
@pytest.mark.parametrize("size", first_of([300_000, 1 << 18, 1 << 20, (1 << 20) + 1], 2))
def test_whole_pages_are_mapped_copy_on_write(cache: TensorCache, shared: SharedDevice, size: int) -> None:
    data = noise(size)
    hash = kept(cache, shared, data)
    region = region_of(shared, size + 3 * 4096)
    region.fill(0, region.size, 0xEE)
    assert cache.load(CLIENT, [HashedBytes(hash, region, 4096, size)]) == [True]
    assert region.memory is not None
    assert region.memory[:4096] == b"\xee" * 4096
    assert region.memory[4096 : 4096 + size] == data
    assert set(region.memory[4096 + size :].tobytes()) == {0xEE}  # the rest of the last page belongs to another region
    region.write(4096, b"changed")
    assert cache.path(CLIENT, hash, size).read_bytes() == entry(data)
    cache.path(CLIENT, hash, size).unlink()
    assert region.memory[4096 + 4096 : 4096 + size] == data[4096:]
    region.free()


@pytest.mark.slow
def test_a_corrupt_mapped_entry_is_dropped(cache: TensorCache, shared: SharedDevice) -> None:
    data = noise(1 << 20)
    hash = kept(cache, shared, data)
    spoilt = bytearray(entry(data))
    spoilt[777_777] ^= 1
    cache.path(CLIENT, hash, 1 << 20).write_bytes(spoilt)
    region = region_of(shared, 1 << 20)
    assert TensorCache(cache.folder).load(CLIENT, [HashedBytes(hash, region, 0, 1 << 20)]) == [False]
    assert not cache.path(CLIENT, hash, 1 << 20).exists()
    region.write(0, data)  # what the client sends then
    assert region.memory == data
    region.free()


@pytest.mark.slow
def test_a_stopping_worker_closes_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clients' last uploads are on disk then."""
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path))
    device = CpuDevice(1)
    with running(device, cache=True) as worker:
        cache = worker.state.cache
        assert cache is not None
        closed: list[TensorCache] = []
        real = cache.close
        monkeypatch.setattr(cache, "close", lambda: (closed.append(cache), real()))
    assert closed == [cache]
    device.close()
