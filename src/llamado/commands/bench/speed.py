"""`llamado bench`: prompt and generation speed, as llama-bench measures them.

A test processes a prompt of N tokens in batches (`pp512`) or N tokens one by one (`tg128`), after a warm-up run. It
starts with an empty KV cache, or after D tokens (`tg128 @ d4096`), which are not timed. Prompts compute logits for the
last token only.
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
from llamado.flags import FlagError, ParsedFlags
from llamado.ggml.role import ModelPart
from llamado.http.monitoring import logs
from llamado.models.memory import Span
from llamado.terminal.text import print

if TYPE_CHECKING:
    from llamado.engine.forward.contract import Forward
    from llamado.engine.loaded_model import LoadedModel
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.gguf.reader import GGUFFile
    from llamado.models.base import Model


@dataclass(frozen=True)
class TestResult:
    """Result of one test: mean and standard deviation over its repetitions."""

    __test__ = False  # pytest: not a test class

    test: str
    tokens_per_second: float
    deviation: float
    gigabytes_per_second: float | None
    """Bandwidth of reading weights, for generation."""
    gigaops_per_second: float | None
    """Multiplications and additions of weight matrices, for prompts."""


def whole_numbers(text: str, flag: str) -> list[int]:
    """Parse the comma-separated integers of a flag. Raises FlagError."""
    try:
        lengths = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        lengths = [-1]
    if any(n < 0 for n in lengths):
        raise FlagError(f"{flag}: expected whole numbers, comma-separated, got {text!r}")
    return lengths


@dataclass(frozen=True)
class TestLengths:
    """Numbers of tokens of the tests: prompts, generations, and context depths for both."""

    __test__ = False  # pytest: not a test class

    prompts: list[int]
    generations: list[int]
    depths: list[int]

    @classmethod
    def of(cls, flags: ParsedFlags) -> TestLengths:
        """Read `-p`, `-n` and `-d`. Raises FlagError, also for an invalid `-r`."""
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
        """Maximum number of tokens of a test."""
        return max(self.depths) + max([*self.prompts, *self.generations])


@contextmanager
def measured_model(
    flags: ParsedFlags, n_tokens: int, n_sequences: int = 1
) -> Iterator[tuple[ModelSource, EngineOptions, LoadedModel]]:
    """Load the model of the flags with a context of `n_tokens` for all sequences; its engine is stopped.

    Raises LlamadoError; FlagError if the context of the model is smaller.
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
        # An idle engine would use the forward pass to prepare for requests.
        llama.engine.close()
        yield source, options, llama


def test_name(kind: str, n: int, depth: int) -> str:
    """Return the name of a test in llama-bench's format."""
    return f"{kind}{n} @ d{depth}" if depth else f"{kind}{n}"


def weights_per_token(file: GGUFFile, model: Model) -> tuple[int, int]:
    """Return the bytes of weights read per generated token, and the multiply-adds per prompt token without the head."""
    operations = sum(
        file.tensors[name].n_elements * role.used // role.experts
        for name, roles in model.roles.items()
        for role in roles
        if role.part is ModelPart.LAYER and file.tensors[name].ne[1] > 1
    )
    return sum(size.read for size in weight_sizes(file, model).values()), operations


class BenchSequence:
    """A sequence that can be reset to a given depth before each run of a test."""

    def __init__(self, forward: Forward, n_tokens: int) -> None:
        """Allocate a sequence of up to `n_tokens`. Raises FlagError if they exceed the context of the model."""
        handle = forward.memory.allocate(n_tokens)
        if handle is None:
            raise FlagError(f"a test of {n_tokens} tokens does not fit the model's context of {forward.memory.n_cells}")
        self._forward, self._handle = forward, handle

    def reset(self, depth: int) -> None:
        """Set the length to `depth` tokens: rewind, or evaluate again from the start if rewinding is impossible."""
        if not self._forward.memory.rewind(self._handle, depth):
            self._forward.memory.rewind(self._handle, 0)
        missing = depth - self._handle.used
        if missing > 0:
            random = np.random.default_rng(2)
            self.feed(random.integers(0, self._forward.n_vocab, missing, dtype=np.int32), self._forward.chunk)

    def feed(self, tokens: NDArray[np.int32], batch: int) -> None:
        """Evaluate tokens, `batch` at a time; compute logits for the last one only."""
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
        """Evaluate tokens one at a time with logits, as in generation."""
        for i in range(len(tokens)):
            self.feed(tokens[i : i + 1], 1)

    def free(self) -> None:
        """Free the cells of the sequence."""
        self._forward.memory.free(self._handle)


def measure(work: Callable[[], None], n: int, repetitions: int, begin: Callable[[], None]) -> tuple[float, float]:
    """Return mean and standard deviation of tokens per second for `n` tokens, after a warm-up run.

    `begin` runs before each repetition and is not timed.
    """
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
) -> list[TestResult]:
    """Run the tests of a loaded model, each after `depth` tokens."""
    forward = llama.forward
    read, operations = weights_per_token(llama.file, llama.model)
    random = np.random.default_rng(1)
    sequence = BenchSequence(forward, depth + max([*prompts, *generations]))
    results = []
    for n, is_prompt in [(n, True) for n in prompts] + [(n, False) for n in generations]:
        tokens = random.integers(0, forward.n_vocab, n, dtype=np.int32)

        def work(tokens: NDArray[np.int32] = tokens, is_prompt: bool = is_prompt) -> None:
            if is_prompt:
                sequence.feed(tokens, forward.chunk)
            else:
                sequence.feed_one_by_one(tokens)

        mean, deviation = measure(work, n, repetitions, lambda: sequence.reset(depth))
        if is_prompt:
            results.append(TestResult(test_name("pp", n, depth), mean, deviation, None, 2e-9 * operations * mean))
        else:
            results.append(TestResult(test_name("tg", n, depth), mean, deviation, 1e-9 * read * mean, None))
    sequence.free()
    return results


class ProfileRow(NamedTuple):
    """Seconds that operations of one kind take in a forward pass, and that threads wait before them."""

    operation: str
    n: int
    work: float
    wait: float


def _profile(llama: LoadedModel, n: int, start: int) -> list[ProfileRow]:
    """Profile a forward pass: the operations of all layers summed by kind, the slowest first."""
    from llamado.engine.forward.runner import ModelRunner

    assert isinstance(llama.forward, ModelRunner)
    n = min(n, llama.forward.max_batch)
    parts: dict[str, ProfileRow] = {}
    for time_ in llama.forward.profile(n, start).operations:
        name = re.sub(r"\b[a-z]+\.\d+\.", "", time_.label)  # without the layer number
        before = parts.get(name, ProfileRow(name, 0, 0.0, 0.0))
        parts[name] = ProfileRow(name, before.n + 1, before.work + time_.work, before.wait + time_.wait)
    return sorted(parts.values(), key=lambda part: part.work + part.wait, reverse=True)


def devices_text(llama: LoadedModel) -> str:
    """Return the names of the devices with layers or the head, such as "CPU + CUDA0"."""
    if llama.cluster is None:
        return "CPU"
    return " + ".join(one.device for one in llama.cluster.view().devices if one.layers or one.head)


def bench(flags: ParsedFlags) -> int:
    """Run the command. Raises LlamadoError."""
    lengths = TestLengths.of(flags)
    with measured_model(flags, lengths.longest) as (source, _, llama):
        device = devices_text(llama)
        results: list[TestResult] = []
        profiles: dict[str, list[ProfileRow]] = {}
        for depth in lengths.depths:
            results += speeds(llama, lengths.prompts, lengths.generations, flags.repetitions, depth)
            if flags.profile:
                profiles |= {test_name("pp", n, depth): _profile(llama, n, depth) for n in lengths.prompts}
                profiles |= {test_name("tg", n, depth): _profile(llama, 1, depth + n - 1) for n in lengths.generations}
    if flags.output == "json":
        rows = [{"model": source.name, "device": device, **asdict(r)} for r in results]
        for row in rows:
            if profile := profiles.get(str(row["test"])):
                row["profile"] = [part._asdict() for part in profile]
        print(json.dumps(rows, indent=2))
        return 0
    print("| model | device | test | tokens/s | weights GB/s | GOP/s |")
    print("|---|---|---:|---:|---:|---:|")
    for r in results:
        read = "" if r.gigabytes_per_second is None else f"{r.gigabytes_per_second:.2f}"
        computed = "" if r.gigaops_per_second is None else f"{r.gigaops_per_second:.1f}"
        rate = f"{r.tokens_per_second:.2f} ± {r.deviation:.2f}"
        print(f"| {source.name} | {device} | {r.test} | {rate} | {read} | {computed} |")
    for test, profile in profiles.items():
        print(f"\n| {test}: operation | times | work ms | wait ms | share |")
        print("|---|---:|---:|---:|---:|")
        whole = sum(part.work + part.wait for part in profile)
        for part in profile:
            share = (part.work + part.wait) / whole
            print(f"| {part.operation} | {part.n} | {1e3 * part.work:.3f} | {1e3 * part.wait:.3f} | {share:.1%} |")
    return 0
