"""`llamado perplexity`: perplexity of a model over a text, by llama-perplexity's method.

The text is cut into chunks of the context size. In each chunk BOS replaces the first token (if the model adds BOS), and
the second half is scored, so that every scored token follows at least half a context.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from llamado.commands.options import engine_options, model_source
from llamado.flags import FlagError, ParsedFlags
from llamado.http.monitoring import logs
from llamado.models.memory import Span
from llamado.terminal.text import print

if TYPE_CHECKING:
    from llamado.engine.forward.contract import Forward

# llama-perplexity's default context.
DEFAULT_CONTEXT = 512


@dataclass
class Score:
    """Sums of the negative log-likelihood and its square over the scored tokens."""

    count: int = 0
    nll: float = 0.0
    nll2: float = 0.0

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.nll / self.count)

    @property
    def error(self) -> float:
        """Standard error of the perplexity."""
        mean = self.nll / self.count
        variance = self.nll2 / self.count - mean * mean
        return self.perplexity * math.sqrt(variance / (self.count - 1)) if variance > 0 and self.count > 1 else 0.0


def score_chunk(forward: Forward, tokens: Sequence[int], score: Score) -> None:
    """Score the second half of one chunk."""
    n = len(tokens)
    first = n // 2
    chunk = np.asarray(tokens, np.int32)
    # Logits of a token have the size of the vocabulary, so batches are small.
    step = min(forward.max_batch, 128)
    handle = forward.memory.allocate(n)
    if handle is None:
        raise FlagError(f"a chunk of {n} tokens does not fit the model's context of {forward.memory.n_cells}")
    for at in range(0, n, step):
        part = chunk[at : at + step]
        positions = np.arange(at, at + len(part), dtype=np.int32)
        scored = np.nonzero((positions >= first) & (positions < n - 1))[0].astype(np.int32)
        logits = forward.start(part, [Span(handle, at, len(part), before=chunk[:at])], scored).result()
        handle.used += len(part)
        for row, i in zip(logits, scored.tolist(), strict=True):
            wide = row.astype(np.float64)
            top = wide.max()
            nll = float(top + np.log(np.exp(wide - top).sum()) - wide[chunk[at + i + 1]])
            score.count += 1
            score.nll += nll
            score.nll2 += nll * nll
    forward.memory.free(handle)


def score_text(
    forward: Forward,
    tokens: Sequence[int],
    n_ctx: int,
    *,
    bos: int | None,
    chunks: int = -1,
    report: Callable[[int, Score], None] = lambda chunk, score: None,
) -> Score:
    """Score the whole chunks of a text, at most `chunks` if it is not negative; call `report` after each one.

    `bos` replaces the first token of each chunk. Raises FlagError.
    """
    if len(tokens) < 2 * n_ctx:
        raise FlagError(
            f"the text has {len(tokens)} tokens; a context of {n_ctx} needs at least {2 * n_ctx}; give a smaller "
            "-c, or more text"
        )
    total = len(tokens) // n_ctx
    score = Score()
    for i in range(total if chunks < 0 else min(chunks, total)):
        chunk = list(tokens[i * n_ctx : (i + 1) * n_ctx])
        if bos is not None:
            chunk[0] = bos
        score_chunk(forward, chunk, score)
        report(i, score)
    return score


def perplexity(flags: ParsedFlags) -> int:
    """Run the command. Raises LlamadoError."""
    logs.configure(verbosity=9 if flags.verbose else min(flags.log_verbosity, 2))
    if not flags.file:
        raise FlagError("-f/--file: expected a text file to score")
    try:
        text = Path(flags.file).read_text(encoding="utf-8")
    except OSError as error:
        raise FlagError(f"-f/--file {flags.file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise FlagError(f"-f/--file {flags.file}: not UTF-8: {error}") from None
    options = engine_options(flags, n_slots=1)
    n_ctx = options.n_ctx or DEFAULT_CONTEXT
    if n_ctx < 4 or flags.chunks == 0:
        raise FlagError("nothing to score: -c needs 4 tokens or more, --chunks 1 or more (or -1)")
    source = model_source(flags)

    from llamado.engine.loaded_model import LoadedModel

    with LoadedModel.load(source, options.with_context(n_ctx)) as llama:
        # An idle engine would use the forward pass to prepare for requests.
        llama.engine.close()
        # As in llama-perplexity, `<|im_end|>` in the text is not a special token.
        text = text.removesuffix("\n")
        tokens = llama.tokenizer.encode(text, add_special=True, parse_special=False)
        bos = llama.tokenizer.bos if llama.tokenizer.add_bos else None

        def report(chunk: int, score: Score) -> None:
            print(f"[{chunk + 1}]{score.perplexity:.4f},", end="", flush=True)

        score = score_text(llama.forward, tokens, n_ctx, bos=bos, chunks=flags.chunks, report=report)
    print()
    print(f"Final estimate: PPL = {score.perplexity:.4f} +/- {score.error:.5f}")
    sys.stdout.flush()
    return 0
