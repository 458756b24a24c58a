"""`llamado bench`: speed of prompts and of generation, as llama-bench measures them.

A test is a prompt of N tokens in batches (`pp512`) or N tokens one by one (`tg128`), after one run to warm up: on an
empty cache, or behind D tokens (`tg128 @ d4096`), which are not timed. Only the last token of a prompt gets logits.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llamado.commands.options import engine_options, model_source
from llamado.engine.forward.sizes import weight_sizes
from llamado.flags import FlagError, Parsed
from llamado.ggml.role import ModelPart
from llamado.http import logs
from llamado.models.memory import Span
from llamado.terminal.text import print

if TYPE_CHECKING:
    from llamado.engine.forward.contract import Forward
    from llamado.engine.loaded_model import LoadedModel
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.gguf.reader import GGUFFile
    from llamado.models.base import Model


@dataclass(frozen=True)
class Speed:
    """Result of one test; tokens per second over its repetitions."""

    test: str
    tokens_per_second: float
    deviation: float
    gigabytes_per_second: float | None
    """Weights read by generation."""
    gigaops_per_second: float | None
    """Multiplications and additions of a prompt's weight matrices."""


def whole_numbers(text: str, flag: str) -> list[int]:
    """Numbers of a flag's value, comma-separated. Raises FlagError."""
    try:
        lengths = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        lengths = [-1]
    if any(n < 0 for n in lengths):
        raise FlagError(f"{flag}: expected whole numbers, comma-separated, got {text!r}")
    return lengths


@dataclass(frozen=True)
class TestLengths:
    """Tokens of prompts and of generation, and tokens behind which both begin."""

    __test__ = False  # for pytest: no test

    prompts: list[int]
    generations: list[int]
    depths: list[int]

    @classmethod
    def of(cls, flags: Parsed) -> TestLengths:
        """Of `-p`, `-n` and `-d`. Raises FlagError, for `-r` too."""
        found = cls(
            [n for n in whole_numbers(flags.n_prompt, "-p/--n-prompt") if n],
            [n for n in whole_numbers(flags.n_gen, "-n/--n-gen") if n],
            whole_numbers(flags.n_depth, "-d/--n-depth") or [0],
        )
        if flags.repetitions < 1:
            raise FlagError(f"-r/--repetitions: expected 1 or more, got {flags.repetitions}")
        if not found.prompts and not found.generations:
            raise FlagError("nothing to measure: give -p or -n a length")
        return found

    @property
    def longest(self) -> int:
        """Tokens that a test has at most."""
        return max(self.depths) + max([*self.prompts, *self.generations])


@contextmanager
def measured_model(
    flags: Parsed, n_tokens: int, n_sequences: int = 1
) -> Iterator[tuple[ModelSource, EngineOptions, LoadedModel]]:
    """The model of the flags with room for `n_tokens` of all sequences, and an engine that does nothing beside it.

    Raises LlamadoError, FlagError where its context is smaller.
    """
    logs.configure(verbosity=9 if flags.verbose else min(flags.log_verbosity, 2))
    options = engine_options(flags, n_slots=n_sequences)
    source = model_source(flags)
    from llamado.engine.loaded_model import LoadedModel

    with LoadedModel.load(source, options.with_context(max(n_tokens, options.n_ctx))) as llama:
        if n_tokens > llama.forward.memory.n_cells:
            raise FlagError(
                f"a test of {n_tokens} tokens does not fit the model's context of {llama.forward.memory.n_cells}"
            )
        # The engine would use its idle time, and the forward pass, to get ready for requests.
        llama.engine.close()
        yield source, options, llama


def test_name(kind: str, n: int, depth: int) -> str:
    """A test's name, as llama-bench writes it."""
    return f"{kind}{n} @ d{depth}" if depth else f"{kind}{n}"


def weights_per_token(file: GGUFFile, model: Model) -> tuple[int, int]:
    """Bytes of weights that generating a token reads, and multiply-adds of a prompt's token without the head."""
    operations = sum(
        file.tensors[name].n_elements * role.used // role.experts
        for name, roles in model.roles.items()
        for role in roles
        if role.part is ModelPart.LAYER and file.tensors[name].ne[1] > 1
    )
    return sum(size.read for size in weight_sizes(file, model).values()), operations


class MeasuredSequence:
    """A sequence that tests begin at the same depth, again and again."""

    def __init__(self, forward: Forward, room: int) -> None:
        """`room`: tokens that it may have. Raises FlagError where that is more than the model's context."""
        handle = forward.memory.allocate(room)
        if handle is None:
            raise FlagError(f"a test of {room} tokens does not fit the model's context of {forward.memory.n_cells}")
        self._forward, self._handle = forward, handle

    def at(self, depth: int) -> None:
        """Have `depth` tokens: by going back, or from the beginning where what is remembered does not reach back."""
        if not self._forward.memory.rewind(self._handle, depth):
            self._forward.memory.rewind(self._handle, 0)
        missing = depth - self._handle.used
        if missing > 0:
            random = np.random.default_rng(2)
            self.feed(random.integers(0, self._forward.n_vocab, missing, dtype=np.int32), self._forward.chunk)

    def feed(self, tokens: NDArray[np.int32], batch: int) -> None:
        """Evaluate tokens, `batch` at a time; logits for the last one."""
        n, started = len(tokens), []
        for at in range(0, n, batch):
            part = tokens[at : at + batch]
            outputs = np.array([len(part) - 1] if at + batch >= n else [], dtype=np.int32)
            used = self._handle.used
            span = Span(self._handle, used, len(part), before=np.zeros(used, np.int32))
            started.append(self._forward.start(part, [span], outputs))
            self._handle.used += len(part)
        for future in started:
            future.result()

    def feed_one_by_one(self, tokens: NDArray[np.int32]) -> None:
        """Evaluate each token alone, with logits, as generation does."""
        for i in range(len(tokens)):
            self.feed(tokens[i : i + 1], 1)

    def free(self) -> None:
        """Give the room back."""
        self._forward.memory.free(self._handle)


def measure(work: Callable[[], None], n: int, repetitions: int, begin: Callable[[], None]) -> tuple[float, float]:
    """Mean and standard deviation of tokens per second of `n` tokens, after one warm-up; `begin` is not timed."""
    begin()
    work()
    rates = []
    for _ in range(repetitions):
        begin()
        began = time.perf_counter()
        work()
        rates.append(n / (time.perf_counter() - began))
    return statistics.fmean(rates), statistics.stdev(rates) if len(rates) > 1 else 0.0


def speeds(
    llama: LoadedModel, prompts: list[int], generations: list[int], repetitions: int, depth: int = 0
) -> list[Speed]:
    """Run the tests of a loaded model, each behind `depth` tokens."""
    forward = llama.forward
    read, operations = weights_per_token(llama.file, llama.model)
    random = np.random.default_rng(1)
    sequence = MeasuredSequence(forward, depth + max([*prompts, *generations]))
    results = []
    for n, is_prompt in [(n, True) for n in prompts] + [(n, False) for n in generations]:
        tokens = random.integers(0, forward.n_vocab, n, dtype=np.int32)

        def work(tokens: NDArray[np.int32] = tokens, is_prompt: bool = is_prompt) -> None:
            if is_prompt:
                sequence.feed(tokens, forward.chunk)
            else:
                sequence.feed_one_by_one(tokens)

        mean, deviation = measure(work, n, repetitions, lambda: sequence.at(depth))
        if is_prompt:
            results.append(Speed(test_name("pp", n, depth), mean, deviation, None, 2e-9 * operations * mean))
        else:
            results.append(Speed(test_name("tg", n, depth), mean, deviation, 1e-9 * read * mean, None))
    sequence.free()
    return results


class ProfileRow(NamedTuple):
    """Seconds that operations of one kind take in a forward pass, and that threads wait before them for each other."""

    operation: str
    n: int
    work: float
    wait: float


def _profile(llama: LoadedModel, n: int, start: int) -> list[ProfileRow]:
    """Where the time of a forward pass goes: operations of all layers taken together, the longest first."""
    from llamado.engine.forward.runner import ModelRunner

    assert isinstance(llama.forward, ModelRunner)
    n = min(n, llama.forward.max_batch)
    parts: dict[str, ProfileRow] = {}
    for time_ in llama.forward.profile(n, start).operations:
        name = re.sub(r"\b[a-z]+\.\d+\.", "", time_.label)  # without the layer's number
        before = parts.get(name, ProfileRow(name, 0, 0.0, 0.0))
        parts[name] = ProfileRow(name, before.n + 1, before.work + time_.work, before.wait + time_.wait)
    return sorted(parts.values(), key=lambda part: part.work + part.wait, reverse=True)


def bench(flags: Parsed) -> int:
    """The command. Raises LlamadoError."""
    lengths = TestLengths.of(flags)
    with measured_model(flags, lengths.longest) as (source, _, llama):
        results: list[Speed] = []
        profiles: dict[str, list[ProfileRow]] = {}
        for depth in lengths.depths:
            results += speeds(llama, lengths.prompts, lengths.generations, flags.repetitions, depth)
            if flags.profile:
                profiles |= {test_name("pp", n, depth): _profile(llama, n, depth) for n in lengths.prompts}
                profiles |= {test_name("tg", n, depth): _profile(llama, 1, depth + n - 1) for n in lengths.generations}
    if flags.output == "json":
        rows = [{"model": source.name, **asdict(r)} for r in results]
        for row in rows:
            if profile := profiles.get(str(row["test"])):
                row["profile"] = [part._asdict() for part in profile]
        print(json.dumps(rows, indent=2))
        return 0
    print("| model | test | tokens/s | weights GB/s | GOP/s |")
    print("|---|---:|---:|---:|---:|")
    for r in results:
        read = "" if r.gigabytes_per_second is None else f"{r.gigabytes_per_second:.2f}"
        computed = "" if r.gigaops_per_second is None else f"{r.gigaops_per_second:.1f}"
        rate = f"{r.tokens_per_second:.2f} ± {r.deviation:.2f}"
        print(f"| {source.name} | {r.test} | {rate} | {read} | {computed} |")
    for test, profile in profiles.items():
        print(f"\n| {test}: operation | times | work ms | wait ms | share |")
        print("|---|---:|---:|---:|---:|")
        whole = sum(part.work + part.wait for part in profile)
        for part in profile:
            share = (part.work + part.wait) / whole
            print(f"| {part.operation} | {part.n} | {1e3 * part.work:.3f} | {1e3 * part.wait:.3f} | {share:.1%} |")
    return 0
