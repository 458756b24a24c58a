"""Rates and loads of the engine over the last hour, one sample per second, independent of `/metrics`."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, fields

from llamado.engine.request import Counters, EngineSnapshot

SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one second; NaN if unknown."""

    at: float
    """Seconds since 1970."""
    prompt: float
    """Prompt tokens computed, per second."""
    answer: float
    """Tokens generated, per second."""
    running: float
    """Requests in slots."""
    waiting: float
    """Requests waiting for a slot."""
    cells: float
    """KV cells in use."""
    first_token: float
    """Mean seconds from a request's arrival to its first token, over the requests with a first token in this second."""
    errors: float
    """Requests that ended with an error."""


_COLUMNS = tuple(field.name for field in fields(Sample))


class Samples:
    """A ring buffer of samples, 64 bytes each."""

    def __init__(self, n_kept: int = SECONDS) -> None:
        self._n_kept = n_kept
        self._ring = array("d", bytes(8 * len(_COLUMNS) * n_kept))
        self.n = 0
        """Number of samples so far."""
        self._at = 0.0
        self._last: Counters | None = None
        self._n_errors = 0

    def take(self, at: float, snapshot: EngineSnapshot, n_errors: int) -> None:
        """Add a sample of the time since the last call. `n_errors`: failed requests since the start."""
        counters, last, seconds = snapshot.counters, self._last, at - self._at
        self._last, self._at = counters, at
        errors, self._n_errors = n_errors - self._n_errors, n_errors
        if last is None or seconds <= 0:
            return
        if counters.n_decode_total < last.n_decode_total:
            last = Counters()  # the model was unloaded and loaded again
        first, before = counters.first_token_seconds, last.first_token_seconds
        n_first = sum(first.counts) - sum(before.counts)
        sample = Sample(
            at,
            (counters.prompt_tokens_total - last.prompt_tokens_total) / seconds,
            (counters.tokens_predicted_total - last.tokens_predicted_total) / seconds,
            snapshot.requests_processing,
            snapshot.requests_deferred,
            snapshot.kv_cells_used,
            (first.sum - before.sum) / n_first if n_first else math.nan,
            errors,
        )
        width = len(_COLUMNS)
        start = self.n % self._n_kept * width
        self._ring[start : start + width] = array("d", [getattr(sample, name) for name in _COLUMNS])
        self.n += 1

    def since(self, n: int) -> dict[str, list[float | None]]:
        """Return the kept samples after the first `n`, by columns, with None for unknown values."""
        width = len(_COLUMNS)
        found: dict[str, list[float | None]] = {name: [] for name in _COLUMNS}
        for number in range(max(n, self.n - self._n_kept), self.n):
            start = number % self._n_kept * width
            for name, value in zip(_COLUMNS, self._ring[start : start + width], strict=True):
                found[name].append(None if math.isnan(value) else round(value, 3))
        return found
