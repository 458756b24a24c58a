"""Parts and what is joined of them: byte for byte those of the real llama-gguf-split."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tiny_models import make_llama

from llamado.commands import cli

pytestmark = [pytest.mark.interop, pytest.mark.full]


@pytest.mark.parametrize(
    "flags",
    [["--split-max-tensors", "6"], ["--split-max-size", "1M"], ["--split-max-tensors", "5", "--no-tensor-first-split"]],
    ids=lambda flags: flags[-1],
)
def test_the_same_bytes(peer_bin: Path, tmp_path: Path, flags: list[str]) -> None:
    model = make_llama(tmp_path / "m.gguf", n_embd=256, wtype="F16")
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder in (ours, theirs):
        folder.mkdir()
    real = str(peer_bin / "llama-gguf-split")
    subprocess.run([real, "--split", *flags, str(model), str(theirs / "p")], check=True, capture_output=True)
    assert cli.main(["llama-gguf-split", "--split", *flags, str(model), str(ours / "p")]) == 0
    first = min(path.name for path in theirs.iterdir())
    subprocess.run([real, "--merge", str(theirs / first), str(theirs / "m.gguf")], check=True, capture_output=True)
    assert cli.main(["gguf", "merge", str(ours / first), str(ours / "m.gguf")]) == 0
    assert len([*theirs.iterdir()]) > 2
    assert {p.name: p.read_bytes() for p in ours.iterdir()} == {p.name: p.read_bytes() for p in theirs.iterdir()}
