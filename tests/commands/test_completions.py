"""Completions of the command line, tested in the shells themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from terminals import Terminal

import llamado
from llamado.commands import cli
from llamado.flags import FLAGS, Kind
from llamado.gguf.sources.catalog import CATALOG
from llamado.gguf.sources.ollama import MODEL_LAYER

Complete = Callable[[str], set[str]]


def requires(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create one model of each source."""
    for name, folder in (("LLAMADO_CACHE", "cache"), ("LLAMADO_MODELS", "large"), ("HF_HUB_CACHE", "hub")):
        monkeypatch.setenv(name, str(tmp_path / folder))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    (models / "own.gguf").touch()
    (models / CATALOG["smollm2"].file_name).touch()
    with open(models / CATALOG["smollm2"].file_name, "wb") as file:
        file.truncate(CATALOG["smollm2"].size)
    (models / CATALOG["gemma3"].file_name).touch()  # broken off
    for repo, name in (("me--tiny-GGUF", "tiny-Q4_0.gguf"), ("me--words", "words.bin")):
        snapshot = tmp_path / "hub" / f"models--{repo}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("abc")
        (snapshot / name).touch()
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "qwen3" / "8b"
    manifest.parent.mkdir(parents=True)
    digest = "ab" * 32
    manifest.write_text(json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": f"sha256:{digest}"}]}))
    (tmp_path / "ollama" / "blobs").mkdir()
    (tmp_path / "ollama" / "blobs" / f"sha256-{digest}").touch()
    return models


def test_models_on_this_machine(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completions", "models"]) == 0
    # An incomplete download is not listed.
    found = ["hf:me/tiny-GGUF:Q4_0", "ollama:qwen3:8b", str(cache / "own.gguf"), "smollm2"]
    assert capsys.readouterr().out.splitlines() == found


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`llamado` on the search path."""
    made = tmp_path / "bin" / "llamado"
    made.parent.mkdir()
    made.write_text(f'#!/bin/sh\nexec {sys.executable} -m llamado "$@"\n')
    made.chmod(0o755)
    monkeypatch.setenv("PATH", f"{made.parent}:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", str(Path(llamado.__file__).parents[1]))  # from any folder
    return made


def script_of(shell: str, folder: Path) -> Path:
    path = folder / f"script.{shell}"
    done = subprocess.run([sys.executable, "-m", "llamado", "completions", shell], capture_output=True, check=True)
    path.write_bytes(done.stdout)
    return path


CASES = [
    ("llamado se", {"serve"}, set()), ("llamado serve --ctx-s", {"--ctx-size"}, {"--ctx-checkpoints"}),
    ("llamado serve -ctk q4", {"q4_0", "q4_1"}, {"q8_0"}), ("llamado serve --reasoning o", {"on", "off"}, {"auto"}),
    ("llamado run smol", {"smollm2"}, {"run"}), ("llamado serve -m smol", {"smollm2"}, set()),
    ("llamado deploy ku", {"kubernetes"}, set()), ("llamado gguf me", {"merge"}, {"set"}),
    ("llamado completions f", {"fish"}, set()), ("llamado worker --no-r", {"--no-ring"}, {"--no-own-files"}),
    ("llamado serve --no-mm", {"--no-mmap"}, set()), ("llamado tap --ctx", set(), {"--ctx-size"}),
]  # fmt: skip


@pytest.mark.full
def test_bash(cache: Path, program: Path, tmp_path: Path) -> None:
    script = script_of("bash", tmp_path)

    def complete(*words: str) -> set[str]:
        listed = " ".join(f"'{word}'" for word in words)
        line = f'. {script}; COMP_WORDS=({listed}); COMP_CWORD={len(words) - 1}; _llamado llamado; printf "%s\\n" '
        shown = subprocess.run(["bash", "-c", line + '"${COMPREPLY[@]}"'], capture_output=True, text=True, check=True)
        return {*shown.stdout.split("\n")} - {""}

    for line, there, not_there in CASES:
        found = complete(*line.split())
        assert there <= found and not found & not_there, (line, found)
    assert complete("llamado", "serve", "-m", "hf", ":", "me") == {"me/tiny-GGUF:Q4_0"}, (
        "only the part after the colon is replaced"
    )
    assert complete("llamado", "serve", "--cache-type-k", "=", "bf") == {"bf16"}
    assert complete("llamado", "serve", "--slot-save-path", str(cache.parent)[:-2]) == {str(cache.parent)}
    assert complete("llamado", "serve", "--port", "") == set()


@pytest.mark.slow
@requires("fish")
def test_fish(cache: Path, program: Path, tmp_path: Path) -> None:
    script = script_of("fish", tmp_path)
    for line, there, not_there in CASES:
        command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
        shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert not shown.stderr
        found = {one.split("\t")[0] for one in shown.stdout.splitlines()}
        assert there <= found and not found & not_there, (line, found)


@pytest.fixture
def zsh(program: Path, tmp_path: Path) -> Iterator[Terminal]:
    script = script_of("zsh", tmp_path)
    terminal = Terminal(["-f"], program=["zsh"], environ={"PS1": "% "})
    terminal.type(f"cd {tmp_path}; PS1='%% '; autoload -U compinit; compinit -D -u; source {script}\r")
    terminal.type("clear; echo begun\r")
    terminal.until("^begun")
    yield terminal
    terminal.close()


@pytest.mark.slow
@requires("zsh")
def test_zsh(cache: Path, zsh: Terminal) -> None:
    for line, there, not_there in CASES:
        zsh.type("\x15clear; echo begun\r")
        zsh.until("^begun")
        zsh.type(line)
        found: set[str] = set()
        for _ in range(10):  # the first Tab may complete a common beginning
            zsh.type("\t")
            for _ in range(10):
                zsh.read(0.1)
                found = {*zsh.shown.replace("\n", " ").split()}
                if there and not not_there and there <= found:  # otherwise wait for unwanted completions
                    break
            if there <= found:
                break
        assert there <= found and not found & (not_there - {"run"}), (line, zsh.shown)
        zsh.type("\x03")


def test_every_script_has_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert cli.main(["completions", shell]) == 0
        script = capsys.readouterr().out
        for flag in FLAGS:
            for name in flag.names if flag.kind is Kind.USED else ():
                spelled = name if shell != "fish" else f" {name.lstrip('-')} "
                assert spelled in script, (shell, name)
        assert all(command in script for command in cli.COMMANDS)
