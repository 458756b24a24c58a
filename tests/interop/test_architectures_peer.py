"""Small models of every architecture: our distributions against those of the real llama.cpp, at 500 positions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from compared import AGREEMENT, MEAN_DIFFERENCE, compare
from peer_server import FLAGS
from tiny import TINY, Tiny, each_architecture, make
from tiny.spec import N_VOCAB

from llamado.models import ARCHITECTURES
from llamado.models.encoder import Encoder

pytestmark = pytest.mark.interop

DECODERS = [name for name, tiny in TINY.items() if not issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)]


@pytest.mark.parametrize("name", each_architecture(DECODERS))
def test_equals_llama_cpp(peer_bin: Path, tmp_path: Path, name: str) -> None:
    tiny = TINY[name]
    # Of a large vocabulary fewer positions: all its probabilities are in memory, of both.
    check(peer_bin, tmp_path, tiny, *((512, 2) if tiny.n_vocab == N_VOCAB else (128, 2)))


@pytest.mark.slow
def test_chunks_of_attention_begin_anew(peer_bin: Path, tmp_path: Path) -> None:
    """Llama 4's are of 8192 tokens, whatever a file says."""
    check(peer_bin, tmp_path, TINY["llama4"], 9216, 1)


def check(peer_bin: Path, folder: Path, tiny: Tiny, n_ctx: int, n_chunks: int) -> None:
    """Distributions in the second half of contexts of so many tokens."""
    found = compare(peer_bin, make(tiny, folder / "m.gguf"), n_ctx, FLAGS.get(tiny.name, []), n_chunks=n_chunks)
    print(
        f"\n| {tiny.name} | {found.n} | {100 * found.agreement:.2f}% | {found.mean_difference:.5f} |", file=sys.stderr
    )
    assert found.n >= (500 if n_ctx >= 512 else 100) and found.n_different > 10  # the model says something
    assert found.agreement >= AGREEMENT and found.mean_difference <= MEAN_DIFFERENCE
