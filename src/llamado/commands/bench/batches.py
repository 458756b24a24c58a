"""`llamado bench -npl 1,2,4,8`: total speed of concurrent sequences, as llama-batched-bench measures it.

A test processes a prompt of PP tokens for each of B sequences, then generates TG tokens for each: every step evaluates
one token per sequence. Tokens are random, not sampled. Columns T are seconds, columns S tokens per second of all
sequences together. Each test has a warm-up run.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from llamado.commands.bench.speed import TestLengths, devices_text, measured_model, whole_numbers
from llamado.flags import FlagError, ParsedFlags
from llamado.models.memory import Span
from llamado.models.memory.pool import align
from llamado.terminal.text import print

if TYPE_CHECKING:
    from llamado.engine.forward.contract import Forward

_WARM_UP = 2  # steps of generation: all steps of a test have the same shape


@dataclass(frozen=True)
class BatchResult:
    """Result of one test, with the field names of llama-batched-bench."""

    pp: int
    tg: int
    pl: int
    n_kv: int
    t_pp: float
    speed_pp: float
    t_tg: float
    speed_tg: float
    t: float
    speed: float

    @classmethod
    def of(cls, pp: int, tg: int, pl: int, t_pp: float, t_tg: float) -> BatchResult:
        n_kv, t = pl * (pp + tg), t_pp + t_tg
        rates = [n / seconds if seconds else 0.0 for n, seconds in ((pl * pp, t_pp), (pl * tg, t_tg), (n_kv, t))]
        return cls(pp, tg, pl, n_kv, t_pp, rates[0], t_tg, rates[1], t, rates[2])


class ConcurrentSequences:
    """`n` sequences of up to `n_tokens` tokens each."""

    def __init__(self, forward: Forward, n: int, n_tokens: int) -> None:
        """Allocate the sequences. Raises FlagError if they do not fit the KV cache."""
        self._forward = forward
        self._handles = []
        for _ in range(n):
            handle = forward.memory.allocate(n_tokens)
            if handle is None:
                self.free()
                raise FlagError(f"{n} sequences of {n_tokens} tokens do not fit a KV cache of {forward.memory.n_cells}")
            self._handles.append(handle)
        self._random = np.random.default_rng(3)

    def _evaluate(self, spans: list[Span], outputs: NDArray[np.int32]) -> None:
        n = sum(span.n for span in spans)
        tokens = self._random.integers(0, self._forward.n_vocab, n, dtype=np.int32)
        future = self._forward.start(tokens, spans, outputs)
        for span in spans:
            span.handle.used += span.n
        future.result()

    def read_prompts(self, n: int) -> None:
        """Process a prompt of `n` tokens per sequence, in batches of maximum size; logits for the last token only."""
        spans: list[Span] = []
        room = self._forward.chunk
        for handle in self._handles:
            remaining = n
            while remaining:
                count = min(remaining, room)
                used = handle.used + sum(span.n for span in spans if span.handle is handle)
                spans.append(Span(handle, used, count, before=np.zeros(used, np.int32)))
                remaining, room = remaining - count, room - count
                last = handle is self._handles[-1] and not remaining
                if not room or last:
                    at = sum(span.n for span in spans) - 1
                    self._evaluate(spans, np.array([at] if last else [], np.int32))
                    spans, room = [], self._forward.chunk

    def generate(self, n: int) -> None:
        """Run `n` steps of one token per sequence, all with logits, in batches of maximum size."""
        for _ in range(n):
            for first in range(0, len(self._handles), self._forward.max_batch):
                handles = self._handles[first : first + self._forward.max_batch]
                spans = [Span(h, h.used, 1, before=np.zeros(h.used, np.int32)) for h in handles]
                self._evaluate(spans, np.arange(len(spans), dtype=np.int32))

    def free(self) -> None:
        """Free the cells of all sequences."""
        for handle in self._handles:
            self._forward.memory.free(handle)


def measure(forward: Forward, pp: int, tg: int, pl: int) -> tuple[float, float]:
    """Return the seconds for the prompts of `pl` sequences, and for generation."""
    sequences = ConcurrentSequences(forward, pl, pp + tg)
    times = []
    for work, n in ((sequences.read_prompts, pp), (sequences.generate, tg)):
        began = time.perf_counter()
        work(n)
        times.append(time.perf_counter() - began)
    sequences.free()
    return times[0], times[1]


def bench_batches(flags: ParsedFlags) -> int:
    """Run the command. Raises LlamadoError."""
    lengths = TestLengths.of(flags)
    parallel = whole_numbers(flags.n_parallel, "-npl/--n-parallel")
    if not all(parallel):
        raise FlagError(f"-npl/--n-parallel: expected 1 or more sequences, got {flags.n_parallel!r}")
    if lengths.depths != [0]:
        raise FlagError("-npl/--n-parallel: generation starts after the prompt (-p); -d is for one sequence only")
    each = align(max([*lengths.prompts, 0]) + max([*lengths.generations, 0]))
    results = []
    with measured_model(flags, max(parallel) * each, max(parallel)) as (source, _, llama):
        for pp in lengths.prompts or [0]:
            for tg in lengths.generations or [0]:
                for pl in parallel:
                    measure(llama.forward, pp, min(tg, _WARM_UP), pl)
                    both = [measure(llama.forward, pp, tg, pl) for _ in range(flags.repetitions)]
                    medians = [statistics.median(times) for times in zip(*both, strict=True)]
                    results.append(BatchResult.of(pp, tg, pl, medians[0], medians[1]))
        device = devices_text(llama)
    if flags.output == "json":
        print(json.dumps([{"model": source.name, "device": device, **asdict(r)} for r in results], indent=2))
        return 0
    print("| model | device | PP | TG | B | N_KV | T_PP s | S_PP t/s | T_TG s | S_TG t/s | T s | S t/s |")
    print(f"|---|---|{'---:|' * 10}")
    for r in results:
        times = [f"{seconds:.3f} | {rate:.2f}" for seconds, rate in ((r.t_pp, r.speed_pp), (r.t_tg, r.speed_tg))]
        print(
            f"| {source.name} | {device} | {r.pp} | {r.tg} | {r.pl} | {r.n_kv} | {' | '.join(times)} | {r.t:.3f} "
            f"| {r.speed:.2f} |"
        )
    return 0
