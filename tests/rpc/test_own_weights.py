"""Weights on the worker's own disk: mapped if they are identical, else sent."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from remote_model import RemoteModel
from tiny_models import make_llama
from waiting import GUARD, until
from wire_client import Client, raw, running

from llamado.devices import kernel_cache
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.split.placement import SplitOptions
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.gguf.reader import GGUFFile
from llamado.rpc import wire
from llamado.rpc.client import own_weights, upload
from llamado.rpc.client.device import RemoteDevice, connect
from llamado.rpc.known_hashes import SHA256_DIGITS, KnownHashes
from llamado.rpc.worker.server import Worker
from llamado.rpc.worker.weights import mapping, own_files
from llamado.rpc.worker.weights.own_files import OwnFiles

TOKENS = [5, 99, 200, 17, 42]


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Treat a tiny model as a large one, without the user's files."""
    monkeypatch.setattr(own_weights, "_LEAST", 1)
    monkeypatch.setattr(upload, "OWN_HASH_THRESHOLD", 1 << 30)
    monkeypatch.setattr(mapping, "_LEAST_MAPPED", 4096)
    monkeypatch.setattr(own_files, "_SCAN_INTERVAL", 0.0)
    kernels = kernel_cache.cache_folder()
    monkeypatch.setattr(kernel_cache, "cache_folder", lambda: kernels)  # not compiled again for each test
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("LLAMADO_MODELS", str(tmp_path / "nothing"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "nothing"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "ours").mkdir()
    return make_llama(tmp_path / "ours" / "model.gguf", wtype="Q8_0", n_embd=128, n_ff=256)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """The worker's folder."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    return folder


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(1)
    yield device
    device.close()


@contextmanager
def remote(worker: Worker, model: Path) -> Iterator[RemoteDevice]:
    (one,) = connect(f"127.0.0.1:{worker.port}", digests=KnownHashes([model], digits=SHA256_DIGITS))
    yield one
    one.close()


def served(device: CpuDevice, *folders: Path) -> Any:
    return running(device, protocol=8, own_files=True, models=tuple(map(str, folders)))


def n_weights(path: Path) -> int:
    with GGUFFile.open(path) as file:
        return file.nbytes


def logits(path: Path, device: Any) -> bytes:
    return RemoteModel(path, device).logits(TOKENS).tobytes()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the sent weights."""
    names: list[str] = []
    original = upload._send

    def note(connection: Any, weight: upload.Weight, *rest: Any) -> None:
        names.append(weight.name)
        original(connection, weight, *rest)

    monkeypatch.setattr(upload, "_send", note)
    return names


@pytest.mark.slow
def test_a_model_on_the_worker_is_not_sent(
    device: CpuDevice, model: Path, theirs: Path, sent: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Under another name, in a subfolder; logits equal those of a local device, to the bit."""
    (theirs / "deep").mkdir()
    (theirs / "deep" / "renamed.gguf").write_bytes(model.read_bytes())
    caplog.set_level(logging.INFO, "llamado.rpc.worker.server")
    with served(device, theirs) as worker, remote(worker, model) as far:
        assert logits(model, far) == logits(model, device)
        assert far.local_weight_bytes == n_weights(model)
        region = max(next(iter(worker._sessions)).buffers.regions.values(), key=lambda r: r.size)
        assert region.memory is not None
        address = np.frombuffer(region.memory, np.uint8).ctypes.data
        lines = Path("/proc/self/maps").read_text().splitlines()
        inside = [line for line in lines if address <= int(line.split("-")[0], 16) < address + region.size]
        assert any("renamed.gguf" in line for line in inside), "the file is mapped, not read"
    assert sent == [] and "from this machine's own disk" in caplog.text


@pytest.mark.full
def test_hashes_are_computed_once(
    device: CpuDevice, model: Path, theirs: Path, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides. Another process of this machine finds the stored ones."""
    (theirs / "model.gguf").write_bytes(model.read_bytes())
    with served(device, theirs) as worker, remote(worker, model) as far:
        right = logits(model, far)

    def never(*_: Any) -> Any:
        raise AssertionError("hashed again")

    monkeypatch.setattr(own_files, "_digest", never)
    monkeypatch.setattr(own_weights, "_digest", never)
    with served(device, theirs) as worker, remote(worker, model) as far:
        assert logits(model, far) == right and far.local_weight_bytes == n_weights(model)
    assert sent == []


def test_hashes_are_stored_for_the_next_process(model: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "_fill", lambda *_: True)
    path, name = theirs / "model.gguf", "token_embd.weight"
    path.write_bytes(model.read_bytes())
    with GGUFFile.open(path) as file:
        size, digest = file.tensors[name].nbytes, hashlib.sha256(file.data(name)).digest()
    files = OwnFiles([theirs])
    assert files.offer([wire.OfferedWeight(name.encode(), size)]) == [True]
    region: Any = None
    assert files.bind([own_files.PlacedWeight(region, 0, size, digest, name.encode())], lambda: False) == [True]
    files.close()
    assert KnownHashes([path], digits=SHA256_DIGITS)[name] == int.from_bytes(digest, "big")

    monkeypatch.setattr(own_files, "_digest", lambda *_: pytest.fail("hashed again"))
    files = OwnFiles([theirs])
    assert files.offer([wire.OfferedWeight(name.encode(), size)]) == [True]
    for sha256, is_right in ((digest, True), (bytes(32), False)):
        assert files.bind([own_files.PlacedWeight(region, 0, size, sha256, name.encode())], lambda: False) == [is_right]
    files.close()


def test_a_weight_is_copied_to_a_device_with_memory_of_its_own(model: Path, theirs: Path) -> None:
    """Its file is closed afterwards."""
    path, name = theirs / "model.gguf", "token_embd.weight"
    path.write_bytes(model.read_bytes())
    with GGUFFile.open(path) as file:
        data = file.data(name).tobytes()
    place = bytearray(len(data) + 20)

    def write(offset: int, piece: bytes) -> None:
        place[offset : offset + len(piece)] = piece

    region: Any = SimpleNamespace(memory=None, write=write)
    files = OwnFiles([theirs])
    wanted = own_files.PlacedWeight(region, 7, len(data), hashlib.sha256(data).digest(), name.encode())
    assert files.offer([wire.OfferedWeight(wanted.name, wanted.size)]) == [True]
    assert files.bind([wanted], lambda: False) == [True]
    files.close()
    assert place == bytes(7) + data + bytes(13)
    assert str(path) not in open_files()


def open_files() -> list[str]:
    """The paths of this process's open files."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(link))
    return found


@pytest.mark.full
def test_a_changed_weight_is_sent(device: CpuDevice, model: Path, theirs: Path, sent: list[str]) -> None:
    """A file of the same name and header, with one other byte in one weight."""
    data = bytearray(model.read_bytes())
    with GGUFFile.open(model) as file:
        info = file.tensors["blk.1.ffn_up.weight"]
    data[info.offset + info.nbytes // 2] ^= 1
    (theirs / "model.gguf").write_bytes(data)
    with served(device, theirs) as worker, remote(worker, model) as far:
        assert logits(model, far) == logits(model, device)
        assert far.local_weight_bytes == n_weights(model) - info.nbytes
    assert sent == ["blk.1.ffn_up.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["in place", "another file", "gone"])
def test_a_file_that_has_changed_is_hashed_again(
    device: CpuDevice, model: Path, theirs: Path, sent: list[str], how: str
) -> None:
    """The file is hashed again even if it has the same size and modification time."""
    path = theirs / "model.gguf"
    path.write_bytes(model.read_bytes())
    files = OwnFiles([theirs])
    with GGUFFile.open(model) as file:
        info = file.tensors["output.weight" if "output.weight" in file.tensors else "token_embd.weight"]
        digest = hashlib.sha256(file.data(info.name)).digest()
    name = info.name.encode()
    assert files.offer([wire.OfferedWeight(name, info.nbytes)]) == [True]
    with served(device, theirs) as worker:
        worker.state.files = files
        with Client(worker) as client:
            ptr, base = client.alloc(info.nbytes)
            bind = wire.Bind((wire.BoundWeight(ptr, base, info.nbytes, digest, name),))
            assert client.data(bind) == b"\1"
            was, data = path.stat(), bytearray(path.read_bytes())
            data[info.offset] ^= 1
            if how == "in place":
                with path.open("r+b") as stream:
                    stream.write(data)
            elif how == "another file":
                (theirs / "new").write_bytes(data)
                os.replace(theirs / "new", path)
            else:
                path.unlink()
            if how != "gone":
                os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
            assert client.data(bind) == b"\0"
            client.data(wire.Offer((wire.OfferedWeight(name, info.nbytes),)))
            assert client.data(bind) == b"\0"


@pytest.mark.slow
def test_a_client_needs_the_hash_of_the_bytes(device: CpuDevice, model: Path, theirs: Path) -> None:
    """A name alone, another hash or size, and a path outside the folders give no bytes."""
    (theirs / "model.gguf").write_bytes(model.read_bytes())
    (theirs / "notes.txt").write_bytes(model.read_bytes())
    with GGUFFile.open(model) as file:
        info = file.tensors["token_embd.weight"]
        digest = hashlib.sha256(file.data(info.name)).digest()
        part = hashlib.sha256(file.data(info.name)[:4096]).digest()
    name, size = info.name.encode(), info.nbytes
    with served(device, theirs) as worker, Client(worker) as client:
        ptr, base = client.alloc(size + 64)
        assert (
            client.data(
                wire.Offer(
                    (
                        wire.OfferedWeight(name, size),
                        wire.OfferedWeight(name, size - 1),
                        wire.OfferedWeight(b"../x", size),
                    )
                )
            )
            == b"\2\0\0"
        )
        for sha, n, called in (
            (bytes(32), size, name), (part, 4096, name), (digest, size, b"other"), (digest, size - 1, name),
        ):  # fmt: skip
            assert client.data(wire.Bind((wire.BoundWeight(ptr, base, n, sha, called),))) == b"\0"
            assert not any(client.get(raw(ptr, base, size), size))
        assert (
            client.data(wire.Bind((wire.BoundWeight(ptr, base + 13, size, digest, name),))) == b"\1"
        )  # copied: not as in its page
        with GGUFFile.open(model) as file:
            assert client.get(raw(ptr, base + 13, size), size) == file.data(info.name).tobytes()
    with served(device, theirs) as worker, Client(worker) as client:
        ptr, base = client.alloc(100)
        client.send(wire.Bind((wire.BoundWeight(ptr, base, size, digest, name),)))
        assert client.is_closed()


@pytest.mark.slow
def test_mapped_weights_can_be_written(device: CpuDevice, model: Path, theirs: Path) -> None:
    """The file does not change."""
    path = theirs / "model.gguf"
    path.write_bytes(model.read_bytes())
    with served(device, theirs) as worker, remote(worker, model) as far:
        file = RemoteModel(model, far).file
        tensor = file.tensors["token_embd.weight"]
        assert far.local_weight_bytes
        region = max(next(iter(worker._sessions)).buffers.regions.values(), key=lambda r: r.size)
        assert region.memory is not None
        region.fill(0, region.size, 0)
        assert tensor.nbytes
    assert path.read_bytes() == model.read_bytes()


@pytest.mark.full
def test_a_returned_worker_has_its_weights(device: CpuDevice, model: Path, theirs: Path, sent: list[str]) -> None:
    (theirs / "model.gguf").write_bytes(model.read_bytes())
    digests = KnownHashes([model], digits=SHA256_DIGITS)
    for _ in range(2):
        with served(device, theirs) as worker:
            (far,) = connect(f"127.0.0.1:{worker.port}", digests=digests)
            RemoteModel(model, far)
            assert far.local_weight_bytes == n_weights(model)
            far.close()
    assert sent == []


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"own_files": True}], ids=["off", "another folder"])
def test_a_worker_without_own_files_gets_all_weights(
    device: CpuDevice, model: Path, sent: list[str], options: dict[str, Any]
) -> None:
    with running(device, protocol=8, **options) as worker, remote(worker, model) as far:
        assert logits(model, far) == logits(model, device)
        assert far.local_weight_bytes == 0
    assert len(sent) > 10


def test_hashes_of_two_processes_are_merged(model: Path, tmp_path: Path) -> None:
    one, other = (KnownHashes([model], tmp_path, SHA256_DIGITS) for _ in range(2))
    one["a"], other["b"] = 1 << 255, 2
    one.save()
    other.save()
    assert dict(KnownHashes([model], tmp_path, SHA256_DIGITS)) == {"a": 1 << 255, "b": 2}
    assert not KnownHashes([model], tmp_path)
    (kept,) = tmp_path.glob("*.json")
    assert set(map(len, json.loads(kept.read_text()).values())) == {SHA256_DIGITS}
    time.sleep(0.01)
    os.utime(model)
    assert not KnownHashes([model], tmp_path, SHA256_DIGITS)


def test_a_folder_with_other_files(theirs: Path, model: Path) -> None:
    """Broken files, parts of a model and other files are no error."""
    (theirs / "broken.gguf").write_bytes(model.read_bytes()[:1000])
    (theirs / "empty.gguf").touch()
    (theirs / "link.gguf").symlink_to(theirs / "nowhere")
    (theirs / "folder.gguf").mkdir()
    os.mkfifo(theirs / "pipe.gguf")
    (theirs / "good.gguf").symlink_to(model)
    files = OwnFiles([theirs, theirs / "missing"])
    with GGUFFile.open(model) as file:
        size = file.tensors["token_embd.weight"].nbytes
    assert files.offer([wire.OfferedWeight(b"token_embd.weight", size)]) == [True]
    files.close()


def test_new_files_are_found_after_a_while(model: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 100.0
    monkeypatch.setattr(own_files, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(own_files, "_SCAN_INTERVAL", 5.0)
    files = OwnFiles([theirs])
    with GGUFFile.open(model) as file:
        offered = [wire.OfferedWeight(b"token_embd.weight", file.tensors["token_embd.weight"].nbytes)]
    (theirs / "other.gguf").write_bytes(make_llama(model.with_name("other.gguf"), n_embd=32).read_bytes())
    assert files.offer(offered) == [False]
    (theirs / "model.gguf").write_bytes(model.read_bytes())
    assert files.offer(offered) == [False]
    clock += 5.0
    assert files.offer(offered) == [True]
    (file,) = files._index[offered[0]]
    assert file.hashing.keys() == {b"token_embd.weight"}  # before the client asks for it
    files.close()


def test_files_that_did_not_change_are_not_read_again(
    model: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    def note(path: Path, stamp: Any, made: Any = own_files._ModelFile) -> Any:
        read.append(path.name)
        return made(path, stamp)

    monkeypatch.setattr(own_files, "_ModelFile", note)
    files = OwnFiles([theirs])
    for name in ("one.gguf", "two.gguf"):
        (theirs / name).write_bytes(model.read_bytes())
        files.offer([])
    assert read == ["one.gguf", "two.gguf"]
    files.close()


def test_only_so_many_models_of_a_folder_are_read(model: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_files, "_MOST_FILES", 2)
    for name in ("a.gguf", "b.txt", "c.gguf", "d.txt", "e.gguf"):
        (theirs / name).write_bytes(model.read_bytes())
    files = OwnFiles([theirs])
    files.offer([])
    assert len(files._files) == 2 and {path.suffix for path in files._files} == {".gguf"}
    files.close()


def test_weights_that_wait_are_not_hashed_after_the_end(
    model: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end does not wait for those that are being hashed."""
    (theirs / "model.gguf").write_bytes(model.read_bytes())
    hashed: list[bytes] = []
    ended = threading.Event()

    def digest(file: Any, name: bytes) -> None:
        hashed.append(name)
        ended.wait(GUARD)

    monkeypatch.setattr(own_files, "_digest", digest)
    files = OwnFiles([theirs])
    with GGUFFile.open(model) as file:
        offered = [wire.OfferedWeight(name.encode(), info.nbytes) for name, info in file.tensors.items()]
    assert all(files.offer(offered)) and len(offered) > own_files._THREADS
    files.close()
    assert not ended.is_set()
    ended.set()
    files._pool.shutdown()
    assert len(hashed) <= own_files._THREADS


def test_nothing_is_bound_for_a_client_that_left(model: Path, theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OwnFiles, "_bind", lambda *_: True)
    files = OwnFiles([theirs])
    region: Any = None
    wanted = [own_files.PlacedWeight(region, 0, 1, b"", b"name")]
    assert files.bind(wanted, lambda: True) == [False]
    assert files.bind(wanted, lambda: False) == [True]
    files.close()


@pytest.mark.full
def test_moved_layers_are_not_sent(tmp_path: Path, theirs: Path, sent: list[str]) -> None:
    """Two workers with the file: one more joins, one dies and returns, and answers stay the same."""
    model = make_llama(theirs / "m.gguf", n_embd=256, n_ff=512, n_layer=4, wtype="Q4_0")
    split = SplitOptions(tensor_split=(1.0,), request_wait=120.0, failover=0.0)

    def options(split: SplitOptions | None) -> EngineOptions:
        return EngineOptions(n_ctx=512, n_slots=1, n_threads=1, split=split, drafts=DraftOptions(kinds=()))

    def answer(llama: LoadedModel) -> list[int]:
        return [*llama.complete([1, 2, 3], n_predict=8, temperature=0.0, ignore_eos=True).tokens]

    def own(llama: LoadedModel) -> dict[str, tuple[int, int]]:
        assert llama.cluster is not None
        return {
            d.endpoint: (d.memory.own_disk, d.memory.weights)
            for d in llama.cluster.view().devices
            if d.endpoint and d.holds
        }

    with LoadedModel.load(model, options(None)) as alone:
        right = answer(alone)
    devices = [CpuDevice(1), CpuDevice(1)]
    with served(devices[0], theirs) as stays, LoadedModel.load(model, options(split)) as llama:
        assert llama.cluster is not None
        llama.cluster.join(str(stays.endpoint))
        with served(devices[1], theirs) as dies:
            port = dies.port
            llama.cluster.join(str(dies.endpoint))
            assert answer(llama) == right and len(own(llama)) == 2
            assert all(mine == all_ > 0 for mine, all_ in own(llama).values())
        assert answer(llama) == right and set(own(llama)) == {str(stays.endpoint)}
        with running(devices[1], port=port, protocol=8, own_files=True, models=(str(theirs),)):

            def both() -> bool:
                assert answer(llama) == right
                return len(own(llama)) == 2

            until(both)
            assert all(mine == all_ > 0 for mine, all_ in own(llama).values())
            assert answer(llama) == right
    assert sent == []
    for device in devices:
        device.close()


def test_a_changed_file_is_closed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = model.stat()
    file = own_files._ModelFile(model, own_files._Stamp.of(status))
    os.close(file.open())
    opened: list[int] = []
    real = os.open

    def noted(*given: Any, **options: Any) -> int:
        opened.append(real(*given, **options))
        return opened[-1]

    monkeypatch.setattr(os, "open", noted)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(OSError, match="has changed"):
        file.open()
    assert len(opened) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
