"""Importance matrices against those of the real llama-imatrix on the same text."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from tiny import TINY, make
from tiny_models import make_llama

from llamado.commands import cli
from llamado.gguf import GGUFFile

pytestmark = [pytest.mark.interop, pytest.mark.full]


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_sums_are_llama_imatrixs(peer_bin: Path, tmp_path: Path, name: str) -> None:
    """Counts and names are equal; sums differ by the rounding of activations."""
    path = tmp_path / "m.gguf"
    model = make_llama(path, wtype="F32") if name == "llama" else make(TINY[name], path)
    (tmp_path / "t").write_text("the quick brown fox jumps over the lazy dog. Paris is the capital of France. " * 30)
    flags = ["-m", str(model), "-f", str(tmp_path / "t"), "-c", "128", "--chunks", "3", "--process-output"]
    ours, theirs = tmp_path / "ours.gguf", tmp_path / "theirs.gguf"
    command = [str(peer_bin / "llama-imatrix"), *flags, "-o", str(theirs), "-t", "2", "-ngl", "0"]
    subprocess.run(command, check=True, capture_output=True)
    assert cli.main(["imatrix", *flags, "-o", str(ours)]) == 0
    with GGUFFile.open(ours) as a, GGUFFile.open(theirs) as b:
        assert list(a.metadata) == list(b.metadata) and list(a.tensors) == list(b.tensors)
        assert all(a.metadata[key] == b.metadata[key] for key in a.metadata)
        for key, info in b.tensors.items():
            left, right = a.data(key).view(np.float32), b.data(key).view(np.float32)
            assert a.tensors[key].ne == info.ne
            if key.endswith(".counts"):
                np.testing.assert_array_equal(left, right)
            elif key.endswith(".in_sum2"):
                np.testing.assert_allclose(left, right, rtol=5e-3, atol=1e-6 * right.max(), err_msg=key)
                assert np.sqrt(np.mean((left / np.maximum(right, 1e-9 * right.max()) - 1) ** 2)) < 1e-3, key
            elif key.endswith(".stats"):
                np.testing.assert_allclose(left, right, rtol=2e-2, atol=2e-3, err_msg=key)
