"""Small models of every architecture: our distributions against those of the real llama.cpp, at 500 positions."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from long_text import long_text
from parity import log_softmax, logits_along
from saved_logits import saved_logits
from tiny import TINY, Tiny, make

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.models import ARCHITECTURES
from llamado.models.encoder import Encoder

pytestmark = pytest.mark.interop

N_CTX, N_CHUNKS = 512, 2
AGREEMENT, MEAN_DIFFERENCE = 0.99, 0.01
N_TOP = 10
DECODERS = [name for name, tiny in TINY.items() if not issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)]


@pytest.mark.parametrize("name", DECODERS)
def test_the_real_one_says_the_same(peer_bin: Path, tmp_path: Path, name: str) -> None:
    compare(peer_bin, tmp_path, TINY[name], N_CTX, N_CHUNKS)


@pytest.mark.slow
def test_chunks_of_attention_begin_anew(peer_bin: Path, tmp_path: Path) -> None:
    """Llama 4's are of 8192 tokens, whatever a file says."""
    compare(peer_bin, tmp_path, TINY["llama4"], 9216, 1)


def compare(peer_bin: Path, folder: Path, tiny: Tiny, n_ctx: int, n_chunks: int) -> None:
    """Distributions in the second half of contexts of so many tokens."""
    path = make(tiny, folder / "m.gguf")
    text = folder / "text.txt"
    text.write_text(long_text(6 * n_ctx))
    theirs = saved_logits(peer_bin, path, text, n_ctx, ["--chunks", str(n_chunks)])
    with LoadedModel.load(path, EngineOptions(n_ctx=n_ctx, n_threads=2)) as loaded:
        loaded.engine.close()  # the forward pass is driven from here
        if loaded.tokenizer.add_bos:  # the program puts it in the place of each chunk's first token
            theirs.tokens[:, 0] = loaded.tokenizer.bos
        ours = np.array(
            [
                [log_softmax(row) for row in logits_along(loaded.forward, chunk.tolist(), theirs.first)][:-1]
                for chunk in theirs.tokens
            ]
        )
    best = theirs.logprobs.argmax(-1)
    top = np.argsort(theirs.logprobs, axis=-1)[..., -N_TOP:]
    difference = np.abs(np.take_along_axis(ours - theirs.logprobs, top, -1)).mean()
    agreement = (ours.argmax(-1) == best).mean()
    print(f"\n| {tiny.name} | {best.size} | {100 * agreement:.2f}% | {difference:.5f} |", file=sys.stderr)
    assert best.size >= 500 and len(np.unique(best)) > 10  # the model says something
    assert agreement >= AGREEMENT and difference <= MEAN_DIFFERENCE
