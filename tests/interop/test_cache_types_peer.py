"""Every type of cache: our distributions against those of the real llama.cpp with the same flags."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from long_text import long_text
from parity import log_softmax, logits_along
from saved_logits import SavedLogits, saved_logits
from tiny_models import make_llama

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions

pytestmark = [pytest.mark.interop, pytest.mark.full]

N_CTX, N_TOP = 256, 10
Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of float32, with heads of 128."""
    path = tmp_path_factory.mktemp("floats") / "m.gguf"
    return make_llama(path, n_embd=512, n_ff=768, n_head=4, n_head_kv=2, wtype="F32")


TYPES = [
    *("f32/f32", "f16/f16", "bf16/bf16", "q8_0/q8_0", "q4_0/f16", "f16/q4_0"),
    *("q4_0/q4_0", "q4_1/q4_1", "q5_0/q5_0", "q5_1/q5_1", "iq4_nl/iq4_nl", "q8_0/q5_1"),
]


@pytest.mark.parametrize("types", TYPES)
def test_equals_llama_cpp(
    peer_bin: Path, floats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, types: str
) -> None:
    k, v = types.split("/")
    text = tmp_path / "text.txt"
    text.write_text(long_text(8 * N_CTX))
    flags = ["--chunks", "2", "-ctk", k, "-ctv", v]
    theirs = saved_logits(peer_bin, floats, text, N_CTX, flags)
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    plain = saved_logits(peer_bin, floats, text, N_CTX, flags)
    options = EngineOptions(n_ctx=N_CTX, n_threads=2, type_k=k, type_v=v)
    ours, unturned = (spoken(floats, replace(options, rotated=turned), theirs) for turned in (True, False))
    top = np.argsort(theirs.logprobs, axis=-1)[..., -N_TOP:]

    def difference(a: Array, b: Array) -> float:
        return float(np.abs(np.take_along_axis(a, top, -1) - np.take_along_axis(b, top, -1)).mean())

    other = difference(plain.logprobs, theirs.logprobs)
    found = difference(ours, theirs.logprobs), difference(unturned, plain.logprobs)
    print(f"\n| {types} | {found[0]:.5f} | not turned {found[1]:.5f} | both of theirs {other:.5f} |", file=sys.stderr)
    if "q" in types:  # what is left is that llama.cpp rounds queries to eight bits where keys are quantized
        assert max(found) < 0.5 * other
    else:
        assert max(found) < 0.002 and other == 0 and np.array_equal(ours, unturned)


def spoken(path: Path, options: EngineOptions, theirs: SavedLogits) -> Array:
    """Our log-probabilities where theirs were saved."""
    with LoadedModel.load(path, options) as loaded:
        loaded.engine.close()  # the forward pass is driven from here
        return np.array(
            [
                [log_softmax(row) for row in logits_along(loaded.forward, chunk.tolist(), theirs.first)][:-1]
                for chunk in theirs.tokens
            ]
        )
