"""Statistics for `/metrics`, collected on the engine's thread: each record costs well under a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.request import Counters, Histogram, Timings

# Seconds: a first token takes milliseconds with a warm cache and minutes in a long queue.
_WAITS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)

# least prompt tokens of a step whose pace is measured
PACE_UNIT = 16


class Buckets:
    """A mutable histogram."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def histogram(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._sum)


class Statistics:
    """Counts and histograms of requests and batches."""

    def __init__(self, drafts: DraftManager | None = None) -> None:
        self._drafts = drafts
        self.first_token = Buckets(_WAITS)
        self.inter_token = Buckets(_BETWEEN)
        self.queue = Buckets(_WAITS)
        self.batch_tokens = Buckets(_TOKENS)
        self.n_prompt = self.n_cached = self.n_predicted = self.n_steps = 0
        self.n_decode = self.n_busy = self.n_tokens_max = 0
        self.prompt_seconds = self.predicted_seconds = 0.0
        self.prompt_pace = 0.0
        """Recent prompt tokens per second."""

    def evaluated(self, n_prompt: int, seconds: float, n_busy: int) -> None:
        """Record a batch with `n_prompt` prompt tokens, with `n_busy` slots at work."""
        self.n_decode += 1
        self.n_busy += n_busy
        if not n_prompt:
            return
        self.n_prompt += n_prompt
        self.prompt_seconds += seconds
        if n_prompt >= PACE_UNIT:
            pace = n_prompt / max(seconds, 1e-9)
            self.prompt_pace = 0.7 * self.prompt_pace + 0.3 * pace if self.prompt_pace else pace

    def finished(self, n_generated: int, timings: Timings) -> None:
        """Record the end of an answer."""
        self.predicted_seconds += 1e-3 * timings.predicted_ms
        self.n_steps += max(0, n_generated - 1)

    def counters(self) -> Counters:
        drafts = self._drafts
        kinds = () if drafts is None else drafts.counts
        return Counters(
            self.n_prompt,
            self.prompt_seconds,
            self.n_cached,
            self.n_predicted,
            self.n_steps,
            self.predicted_seconds,
            self.n_decode,
            self.n_busy,
            self.n_tokens_max,
            sum(kind.n_drafts for kind in kinds),
            sum(kind.n_drafted for kind in kinds),
            sum(kind.n_accepted for kind in kinds),
            () if drafts is None else tuple(drafts.accepted_at),
            self.first_token.histogram(),
            self.inter_token.histogram(),
            self.queue.histogram(),
            self.batch_tokens.histogram(),
            kinds,
        )
