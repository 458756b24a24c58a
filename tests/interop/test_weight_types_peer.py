"""Files of every type of weights, those that it can written by the real llama-quantize: our distributions against
llama.cpp's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from long_text import long_text
from parity import log_softmax, logits_along
from saved_logits import saved_logits
from tiny_models import make_llama

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.gguf.reader import GGUFFile

pytestmark = [pytest.mark.interop, pytest.mark.full]

N_CTX, N_CHUNKS, N_TOP = 256, 2, 10
TYPES = [
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
]
RANDOM = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"]
"""Types that llama-quantize refuses to write without an importance matrix of every tensor: blocks of random bytes."""
SHAPE = {"n_embd": 512, "n_ff": 768, "n_head": 8, "n_head_kv": 4}


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of float32 whose rows are whole blocks of every type."""
    return make_llama(tmp_path_factory.mktemp("floats") / "m.gguf", wtype="F32", **SHAPE)


def quantized(programs: Path, floats: Path, out: Path, name: str) -> Path:
    """All matrices of the model in one type."""
    options = ["--pure", "--token-embedding-type", name.lower(), "--output-tensor-type", name.lower()]
    options += ["--tensor-type", f"blk={name.lower()}"]
    command = [str(programs / "llama-quantize"), *options, str(floats), str(out), "Q8_0", "2"]
    done = subprocess.run(command, capture_output=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")[-2000:]
    return out


@pytest.mark.parametrize("name", [*TYPES, *RANDOM])
def test_equals_llama_cpp(peer_bin: Path, floats: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "q.gguf"
    if name in RANDOM:
        make_llama(path, wtype=name, **SHAPE)
    else:
        quantized(peer_bin, floats, path, name)
    with GGUFFile.open(path) as file:
        assert {t.type.name for t in file.tensors.values() if t.ne[1] > 1} == {name}
    text = tmp_path / "text.txt"
    text.write_text(long_text(8 * N_CTX))
    theirs = saved_logits(peer_bin, path, text, N_CTX, ["--chunks", str(N_CHUNKS)])
    with LoadedModel.load(path, EngineOptions(n_ctx=N_CTX, n_threads=2)) as loaded:
        loaded.engine.close()  # the forward pass is driven from here
        ours = np.array(
            [
                [log_softmax(row) for row in logits_along(loaded.forward, chunk.tolist(), theirs.first)][:-1]
                for chunk in theirs.tokens
            ]
        )
    top = np.argsort(theirs.logprobs, axis=-1)[..., -N_TOP:]
    right = np.take_along_axis(theirs.logprobs, top, -1)
    difference = np.abs(np.take_along_axis(ours, top, -1) - right).mean()
    agreement = (ours.argmax(-1) == theirs.logprobs.argmax(-1)).mean()
    spread = theirs.logprobs.std(-1).mean()
    print(f"\n| {name} | {100 * agreement:.1f}% | {difference:.4f} | {spread:.3f} |", file=sys.stderr)
    assert agreement >= 0.9 and difference <= 0.02 * spread
