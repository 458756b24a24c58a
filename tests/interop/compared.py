"""Compare a small model's distributions at every position of a text with llama-perplexity's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from long_text import long_text
from parity import log_softmax, logits_along
from saved_logits import saved_logits

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions

AGREEMENT, MEAN_DIFFERENCE = 0.99, 0.01
_N_TOP = 10
_PLAIN = EngineOptions()


class Comparison(NamedTuple):
    """Positions, how many tokens are likeliest at any, the share where both agree, and the mean difference of the ten
    largest log-probabilities.
    """

    n: int
    n_different: int
    agreement: float
    mean_difference: float


def compare(
    programs: Path,
    path: Path,
    n_ctx: int,
    flags: Sequence[str] = (),
    options: EngineOptions = _PLAIN,
    n_chunks: int = 2,
) -> Comparison:
    """Both on the same text, in the second half of chunks of `n_ctx` tokens.

    `flags` are the real one's, `options` ours.
    """
    text = path.parent / "text.txt"
    text.write_text(long_text(6 * n_ctx))
    theirs = saved_logits(programs, path, text, n_ctx, ["--chunks", str(n_chunks), *flags])
    with LoadedModel.load(path, replace(options, n_ctx=n_ctx, n_threads=2)) as loaded:
        loaded.engine.close()  # the forward pass is driven from here
        said = loaded.tokenizer.encode(text.read_text(), add_special=True)
        assert said[: theirs.tokens.size] == theirs.tokens.reshape(-1).tolist()
        if loaded.tokenizer.add_bos:  # the program puts it in the place of each chunk's first token
            theirs.tokens[:, 0] = loaded.tokenizer.bos
        ours = np.array(
            [
                [log_softmax(row) for row in logits_along(loaded.forward, chunk.tolist(), theirs.first)][:-1]
                for chunk in theirs.tokens
            ]
        )
    best = theirs.logprobs.argmax(-1)
    top = np.argsort(theirs.logprobs, axis=-1)[..., -_N_TOP:]
    difference = float(np.abs(np.take_along_axis(ours - theirs.logprobs, top, -1)).mean())
    return Comparison(best.size, len(np.unique(best)), float((ours.argmax(-1) == best).mean()), difference)
