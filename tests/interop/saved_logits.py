"""The distributions that llama-perplexity saves with `--kl-divergence-base`: of every position of a text's chunks."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"_logits_"


@dataclass(frozen=True)
class SavedLogits:
    """`tokens` int32 [n_chunks, n_ctx]; `logprobs` float32 [n_chunks, n, n_vocab], behind tokens `first` to n_ctx − 2
    of each chunk; they are rounded to 16 bits of the range that a position's have, at most 16.
    """

    tokens: NDArray[np.int32]
    first: int
    logprobs: NDArray[np.float32]


def saved_logits(programs: Path, model: Path, text: Path, n_ctx: int, options: Sequence[str] = ()) -> SavedLogits:
    """Runs llama-perplexity on a text; layout of the file: `log_softmax` in tools/perplexity/perplexity.cpp."""
    out = text.with_suffix(".logits")
    command = [str(programs / "llama-perplexity"), "-m", str(model), "-f", str(text), "-c", str(n_ctx), "-ngl", "0"]
    command += ["-t", "2", "-b", str(n_ctx), "-fa", "on", "--no-warmup", "--kl-divergence-base", str(out), *options]
    done = subprocess.run(command, capture_output=True, timeout=600)
    said = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0 and out.exists(), said[-3000:]
    data = np.fromfile(out, np.uint8)
    assert data[:8].tobytes() == _MAGIC, said[-3000:]
    n_ctx, n_vocab, n_chunks = (int(n) for n in data[8:20].view(np.int32))
    tokens = data[20 : 20 + 4 * n_chunks * n_ctx].view(np.int32).reshape(n_chunks, n_ctx)
    first = n_ctx // 2
    width = (n_vocab + 1) // 2 * 2 + 4
    rows: NDArray[Any] = data[20 + tokens.nbytes :].view(np.uint16).reshape(n_chunks, n_ctx - 1 - first, width)
    range_ = rows[..., :4].copy().view(np.float32)  # [n_chunks, n, 2]: a step, and the least
    return SavedLogits(tokens, first, rows[..., 4 : 4 + n_vocab] * range_[..., :1] + range_[..., 1:])
