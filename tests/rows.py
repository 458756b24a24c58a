"""Batches at rows of a memory that the test itself chooses."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from llamado.engine.forward.contract import Forward
from llamado.engine.forward.runner import ModelRunner
from llamado.models.batch import Batch, MemoryRows
from llamado.models.memory import Span

Array = np.ndarray[Any, Any]


def start_at(
    runner: ModelRunner,
    tokens: Any,
    positions: Any,
    starts: Any,
    outputs: Any,
    *,
    scales: tuple[float, ...] = (),
) -> Future[Array]:
    """Each token goes to the row `start + position` of a memory that keeps all tokens, and sees those from `start`."""
    tokens, positions = np.asarray(tokens, np.int32), np.asarray(positions, np.int32)
    starts = np.asarray(starts, np.int64)
    rows = MemoryRows(starts + positions, starts, starts + positions, runner.memory.n_cells)
    return runner.submit(Batch(positions, np.asarray(outputs, np.int32), (rows,), tokens), scales)


def feed_sequence(
    forward: Forward, tokens: Sequence[int], *, chunk: int | None = None, scales: tuple[float, ...] = ()
) -> Array:
    """Logits of the last token of a sequence that is read from its first token on and forgotten."""
    memory, step = forward.memory, chunk or forward.max_batch
    handle = memory.allocate(len(tokens))
    assert handle is not None
    rows = np.empty(0)
    for at in range(0, len(tokens), step):
        part = np.array(tokens[at : at + step], np.int32)
        last = np.array([part.size - 1], np.int32)
        rows = forward.start(part, [Span(handle, at, part.size)], last, scales=scales).result(60)[0].copy()
        handle.used += part.size
    memory.free(handle)
    return rows
