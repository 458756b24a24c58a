"""The same model with other weights: all of them in float32, or one of them changed by the least there is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np

from llamado.gguf.reader import GGUFFile


def to_float32(programs: Path, model: Path, out: Path) -> Path:
    """The model with every weight de-quantized, as llama-quantize does it."""
    command = [str(programs / "llama-quantize"), "--allow-requantize", str(model), str(out), "F32", "2"]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-2000:]
    return out


def with_nudged_norm(model: Path, out: Path) -> Path:
    """The model with the weights of its first norm each one unit in the last place greater."""
    shutil.copy(model, out)
    with GGUFFile.open(model) as file:
        tensor = file.tensors["blk.0.attn_norm.weight"]
        norm = np.array(file.data(tensor.name)).view(np.float32)
    there = np.memmap(out, np.float32, "r+", tensor.offset, norm.shape)
    assert np.array_equal(there, norm)
    there[:] = np.nextafter(norm, np.float32(np.inf))
    there.flush()
    return out
