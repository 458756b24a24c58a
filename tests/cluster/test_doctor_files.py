"""Checks of model files and of this machine by `llamado doctor`: each symptom is provoked."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
from ports import free_port
from tiny_models import make_llama

from llamado.cluster.doctor import machine, model_files
from llamado.cluster.doctor.machine import MachineOptions, examine_machine, find_listener
from llamado.cluster.doctor.model_files import examine_model
from llamado.cluster.doctor.symptoms import Finding
from llamado.devices import limits
from llamado.devices.limits import MachineMemory
from llamado.engine.options import EngineOptions
from llamado.gguf.errors import SourceError

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("models") / "tiny.gguf", n_ctx=8192)


def look(path: Path | str, context_given: bool = False, **options: object) -> list[Finding]:
    return examine_model(str(path), EngineOptions(**options), context_given=context_given)  # type: ignore[arg-type]


def one(path: Path | str, context_given: bool = False, **options: object) -> Finding:
    (found,) = look(path, context_given, **options)
    return found


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_good_file_has_no_findings(model: Path) -> None:
    assert look(model) == [] and look(model, True, n_ctx=512) == []


def test_a_model_given_by_url(model: Path, cache: Path) -> None:
    from llamado.gguf.sources.urls import url_target

    url = "https://example.com/tiny.gguf"
    here = url_target(url, cache / "models")
    here.parent.mkdir(parents=True)
    here.write_bytes(model.read_bytes())
    assert look(url) == []
    here.write_bytes(model.read_bytes().replace(b"llama", b"zebra"))
    assert one(url).symptom == "architecture"
    here.write_bytes(model.read_bytes()[:100])
    assert one(url).symptom == "damaged"


def test_an_unreachable_model_raises_an_error() -> None:
    with pytest.raises(SourceError):
        look("pypi:no-such-model")


def test_no_file(tmp_path: Path) -> None:
    assert one(tmp_path / "none.gguf").symptom == "no-file"
    written(tmp_path / "a.gguf", b"GGUF")
    found = one(tmp_path)
    assert found.symptom == "no-file" and "a.gguf" in found.found


def test_an_unreadable_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)
    found = one(model)
    assert found.symptom == "not-readable" and f"chmod a+r {model}" in found.command


@pytest.mark.parametrize(
    ("begins", "cause"),
    [
        (b"<!DOCTYPE html><html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS"),
        (b"PK\x03\x04 pytorch", "ZIP"),
        (b"tjgg\x03\0\0\0", "GGJT"),
        (b"FUGG\0\0\0\x03", "order"),
        (b"", "an error page"),
    ],
)
def test_not_a_gguf(begins: bytes, cause: str, tmp_path: Path) -> None:
    found = one(written(tmp_path / "m.gguf", begins))
    assert found.symptom == "not-gguf" and cause in found.cause


def test_truncated(model: Path, tmp_path: Path) -> None:
    data = model.read_bytes()
    assert one(written(tmp_path / "m.gguf", data[:-1000])).symptom == "truncated"
    assert one(written(tmp_path / "n.gguf", data[:100])).symptom == "truncated"


def test_damaged(model: Path, tmp_path: Path) -> None:
    data = bytearray(model.read_bytes())
    data[4:8] = (77).to_bytes(4, "little")
    assert one(written(tmp_path / "m.gguf", bytes(data))).symptom == "damaged"


def test_parts_are_missing(tmp_path: Path) -> None:
    def split(number: int) -> Path:
        def edit(writer: object) -> None:
            writer.add_uint16("split.count", 3)  # type: ignore[attr-defined]
            writer.add_uint16("split.no", number)  # type: ignore[attr-defined]

        return make_llama(tmp_path / f"m-{number + 1:05d}-of-00003.gguf", edit=edit)

    found = one(split(0))
    assert (
        found.symptom == "missing-part"
        and "m-00002-of-00003.gguf" in found.found
        and "download all of m* " in found.command
    )
    assert one(split(1)).symptom == "missing-part"


def renamed(model: Path, path: Path, name: bytes) -> Path:
    """Write a copy of the model with another architecture; its name has five letters, like llama."""
    assert len(name) == 5
    return written(path, model.read_bytes().replace(b"llama", name))


def test_an_unknown_architecture(model: Path, tmp_path: Path) -> None:
    found = one(renamed(model, tmp_path / "m.gguf", b"zebra"))
    assert found.symptom == "architecture" and "zebra" in found.found


def test_an_architecture_of_ollama(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m.gguf", edit=lambda writer: writer.add_string("general.architecture", "x"))
    data = path.read_bytes()
    key = b"general.architecture"
    at = data.index(key) + len(key) + 4
    size = int.from_bytes(data[at : at + 8], "little")
    name = b"glm4moelite"
    padded = data[:at] + len(name).to_bytes(8, "little") + name + data[at + 8 + size :]
    found = one(written(tmp_path / "n.gguf", padded + bytes(64)))
    assert found.symptom == "architecture" and "deepseek2" in found.command


def test_an_unsupported_weight_type(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamado.devices.cpu import backend

    monkeypatch.setattr(backend.CpuBackend, "weight_types", lambda self: frozenset())
    found = one(model)
    assert found.symptom == "weight-type" and "Q4_K_M" in found.command


@pytest.mark.parametrize(("kind", "flag"), [("adapter", "--lora"), ("mmproj", "--mmproj")])
def test_not_a_language_model(kind: str, flag: str, tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m.gguf", edit=lambda writer: writer.add_string("general.type", kind))
    found = one(path)
    assert found.symptom == "no-model" and f"{flag} {path}" in found.command


def test_a_file_that_does_not_match_its_architecture(model: Path, tmp_path: Path) -> None:
    path = written(tmp_path / "m.gguf", model.read_bytes().replace(b"blk.1.attn_q", b"blk.1.attn_z"))
    assert one(path).symptom == "invalid-model"


def memory(monkeypatch: pytest.MonkeyPatch, free: int, physical: int = 1 << 40) -> None:
    monkeypatch.setattr(
        limits, "memory", lambda: MachineMemory(free, free if physical < 1 << 40 else 1 << 40, physical)
    )


def test_a_model_larger_than_memory_gets_options_that_fit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KV cache of 8192 tokens has 4 MiB in f16: 2 layers x 2 x 64 elements x 2 bytes per token."""
    monkeypatch.setattr(model_files, "_STEP", 256)
    options = {"n_ctx": 8192, "n_ubatch": 1, "n_batch": 1}
    memory(monkeypatch, 64 * MIB)
    assert look(model, True, **options) == []
    memory(monkeypatch, 4 * MIB)
    found = one(model, True, **options)
    assert found.symptom == "too-large" and "8192 tokens" in found.found and "KV cache 4.0 MiB" in found.found
    offered = found.command.partition("   # or ")
    first = offered[0].split()
    assert first[:4] == ["llamado", "serve", "-m", str(model)] and first[4] == "-c"
    assert look(model, True, **{**options, "n_ctx": int(first[5])}) == []
    assert look(model, True, **{**options, "n_ctx": int(first[5]) + 256})  # it is the longest that fits
    assert "-ctk q8_0 -ctv q8_0" in offered[2]
    assert look(model, True, **options, type_k="q8_0", type_v="q8_0") == []


def test_nothing_fits(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 1000)
    found = one(model)
    assert found.symptom == "too-large" and "add it to --rpc" in found.command


def test_a_shortened_default_context_is_no_finding(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 6 * MIB)
    assert look(model, False, n_ubatch=1, n_batch=1) == []


def test_a_container_limit_below_the_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory(monkeypatch, 1000, physical=1 << 36)
    found = look(model)
    assert [one.symptom for one in found] == ["too-large", "container-memory"]
    assert "docker run --memory 1G" in found[1].command


def test_mlock_of_more_than_the_container_limit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "memory", lambda: MachineMemory(1 << 40, 1000, 1 << 40))
    assert [one.symptom for one in look(model, mlock=True)] == ["lock-limit"]


def ollama(folder: Path, monkeypatch: pytest.MonkeyPatch, blob: bytes | None) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    manifest = folder / "manifests/registry.ollama.ai/library/tiny/latest"
    manifest.parent.mkdir(parents=True)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:" + "0" * 64}
    manifest.write_text(json.dumps({"layers": [layer]}))
    (folder / "blobs").mkdir()
    if blob is not None:
        written(folder / "blobs" / ("sha256-" + "0" * 64), blob)


def test_ollama(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ollama(tmp_path, monkeypatch, model.read_bytes())
    assert look("ollama:tiny") == []
    found = one("ollama:other")
    assert found.symptom == "ollama-model" and found.command.startswith("ollama pull other ") and "tiny" in found.found


def test_ollama_without_its_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ollama(tmp_path, monkeypatch, None)
    found = one("ollama:tiny")
    assert found.symptom == "ollama-blob" and found.command == "ollama pull tiny"


# --- this machine -----------------------------------------------------------------------------------------------------


def only(**options: object) -> Finding:
    (found,) = examine_machine(MachineOptions(**options))  # type: ignore[arg-type]
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_healthy_machine_has_no_findings() -> None:
    assert examine_machine(MachineOptions(port=free_port(), threads=1)) == []


def test_a_taken_port_and_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        found = only(port=sock.getsockname()[1])
    assert found.symptom == "port-taken" and f"(process {os.getpid()})" in found.found
    assert found.command.startswith(f"kill {os.getpid()} ") and Path(sys.executable).name[:6] in found.found


def test_a_taken_port_of_an_unknown_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_listener(1, tmp_path) is None
    monkeypatch.setattr(machine, "find_listener", lambda port: None)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        assert "lsof" in only(port=sock.getsockname()[1]).command


def test_an_address_of_another_machine() -> None:
    assert only(host="203.0.113.7", port=8080).symptom == "not-this-machine"
    assert only(host="no-such-host.invalid", port=8080).symptom == "unknown-host"


def test_a_privileged_port(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, address: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket.socket, "bind", refuse, raising=False)
    assert only(port=80).symptom == "port-forbidden"


def test_more_threads_than_the_container_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cores", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    found = only(threads=16)
    assert found.symptom == "too-many-threads" and "-t 2" in found.command and "of 16" in found.found


def test_a_small_mlock_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (65536, 1 << 20))
    assert only(mlock=True).symptom == "lock-limit"


def test_a_small_open_files_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 256))
    assert only().symptom == "open-files"


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 5 << 20))
    found = only()
    assert found.symptom == "disk-full" and str(cache) in found.command


@pytest.mark.parametrize(
    ("number", "symptom"),
    [(errno.ENOSPC, "disk-full"), (errno.EROFS, "cache-not-writable"), (errno.EACCES, "cache-not-writable")],
)
def test_an_unwritable_cache(number: int, symptom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    found = only()
    assert found.symptom == symptom and os.strerror(number) in found.found
