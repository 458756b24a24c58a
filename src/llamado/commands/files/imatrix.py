"""`llamado imatrix`: compute an importance matrix from a text, in the formats of llama-imatrix.

For each weight matrix it holds the sums of the squares of its input columns over all tokens of the text.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from llamado.commands.options import read_file
from llamado.commands.split_options import workers
from llamado.flags import FlagError, ParsedFlags
from llamado.quantize.imatrix import ColumnSums, Imatrix, is_observed, merge, read_imatrix, write_imatrix
from llamado.quantize.statistics import SCHEMA, TensorSums, statistics
from llamado.terminal.console import Console
from llamado.terminal.text import print

if TYPE_CHECKING:
    from llamado.devices.device import Device
    from llamado.engine.forward.runner import ModelRunner
    from llamado.engine.observed import ProductObserver, RowSums

_BATCH = 512


@dataclass(frozen=True)
class ImatrixOptions:
    """Options from the flags. `first`: first chunk; `chunks`: maximum number (−1: all); `before`: files to add up."""

    model: str
    text_file: str | None
    output: Path
    n_ctx: int = 512
    n_threads: int | None = None
    first: int = 0
    chunks: int = -1
    perplexity: bool = True
    head: bool = False
    special: bool = False
    every: int = 10
    copies: int = 0
    legacy: bool = False
    before: tuple[str, ...] = ()
    rpc: tuple[str, ...] = ()


def run_imatrix(flags: ParsedFlags) -> int:
    """Run the command. Raises LlamadoError."""
    before = tuple(name for given in flags.in_file or [] for name in given.split(",") if name)
    if flags.show_statistics:
        if not before:
            raise FlagError("--show-statistics: give a file with --in-file")
        show(read_imatrix(Path(before[0])))
        return 0
    options = ImatrixOptions(
        flags.model, flags.file, Path(flags.output), flags.ctx_size, flags.threads, flags.chunk, flags.chunks,
        flags.ppl, flags.process_output, flags.parse_special, flags.output_frequency, flags.save_frequency,
        flags.output_format == "dat", before, workers(flags.rpc or []),
    )  # fmt: skip
    if options.text_file is None and not before:
        raise FlagError("-f/--file: expected a text file (or --in-file: files to add up)")
    if options.n_ctx < 32 or options.chunks == 0 or options.first < 0:
        raise FlagError("-c needs 32 tokens or more, --chunks 1 or more (or -1), --chunk 0 or more")
    return compute(options)


def compute(options: ImatrixOptions) -> int:
    """Process the text and write the file. Raises LlamadoError."""
    collector = ImatrixCollector(options)
    if options.text_file is not None:
        _process_text(options, collector)
    collector.write()
    return 0


class ImatrixCollector:
    """Adds up the sums of input files and of the text, and writes them."""

    def __init__(self, options: ImatrixOptions) -> None:
        self._options = options
        self._before = [read_imatrix(Path(name)) for name in options.before]
        self._sums: dict[str, RowSums] = {}

    def add(self, sums: dict[str, RowSums]) -> None:
        """Add the sums of a chunk."""
        for name, new in sums.items():
            self._sums[name] = new.plus(self._sums.get(name))

    def write(self, suffix: str = "") -> None:
        """Write the sums so far. `suffix`: append it to the file name, for a copy. Raises FlagError."""
        options = self._options
        entries = {
            name: ColumnSums(sums.squares.astype(np.float32), sums.rows, sums.plain.astype(np.float32))
            for name, sums in self._sums.items()
        }
        for name, sums in entries.items():
            if not np.isfinite(sums.squares).all():
                raise FlagError(f"{options.model}: inputs of {name} are not finite; the file is damaged")
        parts = list(self._before)
        if options.text_file is not None:
            parts.append(Imatrix(Path(options.text_file), entries, (options.text_file,), 0, options.n_ctx))
        size = next((part.chunk_size for part in self._before if part.chunk_size), options.n_ctx)
        path = options.output.with_name(options.output.name + suffix)
        write_imatrix(path, merge(parts, size), legacy=options.legacy)


def _process_text(options: ImatrixOptions, collector: ImatrixCollector) -> None:
    from llamado.devices.accelerators import Accelerators, LocalDevices
    from llamado.devices.registry import DeviceOptions, open_device
    from llamado.devices.split.placement import SplitOptions
    from llamado.engine.forward.device_pool import DevicePool
    from llamado.engine.forward.fitting import memory_request
    from llamado.engine.forward.options import RunnerOptions
    from llamado.engine.forward.runner import ModelRunner
    from llamado.engine.observed import ProductObserver
    from llamado.engine.options import EngineOptions, ModelSource
    from llamado.engine.supported import fetch_model
    from llamado.gguf import GGUFFile
    from llamado.models import Output, load_model
    from llamado.text.tokenizer.tokenizer import load_tokenizer

    text = read_file("-f/--file", options.text_file or "").removesuffix("\n")
    path = fetch_model(ModelSource(spec=options.model), EngineOptions())
    with GGUFFile.open(path) as file:
        model = load_model(file)
        tokenizer = load_tokenizer(file.metadata)
        n = options.n_ctx
        tokens = np.array(tokenizer.encode(text, add_special=True, parse_special=options.special), np.int32)
        tokens = tokens[options.first * n :]
        if len(tokens) < 2 * n:
            raise FlagError(f"the text has {len(tokens)} tokens; chunks of {n} need at least {2 * n} (-c, -f)")
        count = len(tokens) // n if options.chunks < 0 else min(options.chunks, len(tokens) // n)
        observer = ProductObserver(model.weights, lambda name: is_observed(name, head=options.head))
        devices: list[Device] = [open_device("cpu", DeviceOptions(n_threads=options.n_threads))]
        placement = None
        if options.rpc:
            split = SplitOptions(rpc=options.rpc, tensor_split=())  # by memory, so that each worker gets layers
            wanted = memory_request(EngineOptions(n_ctx=n, n_slots=1, n_batch=_BATCH, n_ubatch=_BATCH, split=split))
            pool = DevicePool(split, LocalDevices(devices[0], Accelerators.none()), file, model, wanted)
            devices, placement = pool.devices, pool.fit.placement
        # Weights of layers need no logits. All rows are output, because the last layer computes output rows only.
        output = Output.LOGITS if options.perplexity or options.head else Output.HIDDEN
        runner = ModelRunner(
            file,
            model,
            devices,
            RunnerOptions(n_cells=n, max_batch=min(n, _BATCH), output=output, observer=observer),
            placement,
        )
        try:
            reader = ChunkReader(
                runner, observer, tokenizer.bos if tokenizer.add_bos else None, options.perplexity, options.n_threads
            )
            began = time.monotonic()
            for i in range(count):
                collector.add(reader.read(tokens[i * n : (i + 1) * n]))
                done = i + 1 + options.first
                if options.perplexity:
                    print(f"[{i + 1}]{reader.score:.4f},", end="", flush=True)
                if options.every > 0 and done % options.every == 0:
                    collector.write()
                if options.copies > 0 and done % options.copies == 0:
                    collector.write(f".at_{done}")
            seconds = time.monotonic() - began
        finally:
            runner.close()
    if options.perplexity:
        print(f"\nFinal estimate: PPL = {reader.score:.4f}")
    print(f"{count} chunks of {n} tokens in {seconds:.1f} s, {count * n / seconds:.0f} tokens/s", file=sys.stderr)


class ChunkReader:
    """Evaluates chunks, each as a separate sequence. `bos` replaces its first token."""

    def __init__(
        self,
        runner: ModelRunner,
        observer: ProductObserver,
        bos: int | None,
        scores: bool,
        n_threads: int | None = None,
    ) -> None:
        self._runner, self._observer, self._bos, self._scores = runner, observer, bos, scores
        self._pool = ThreadPoolExecutor(n_threads or len(os.sched_getaffinity(0)), "imatrix-scores")
        self._nll, self._n = 0.0, 0

    @property
    def score(self) -> float:
        """Perplexity so far, over the second halves of the chunks."""
        return math.exp(self._nll / max(self._n, 1))

    def read(self, chunk: NDArray[np.int32]) -> dict[str, RowSums]:
        """Evaluate a chunk and return the sums of its products. Raises FlagError."""
        from llamado.models.memory import Span

        runner, n = self._runner, len(chunk)
        given = chunk.copy()
        if self._bos is not None:
            given[0] = self._bos
        handle = runner.memory.allocate(n)
        if handle is None:
            raise FlagError(f"a chunk of {n} tokens does not fit the model's context")
        total: dict[str, RowSums] = {}
        at = 0
        while at < n:
            size = runner.unpadded(min(n - at, runner.max_batch))
            everything = np.arange(size, dtype=np.int32)
            spans = [Span(handle, at, size, before=given[:at])]
            logits = runner.start(given[at : at + size], spans, everything).result()
            handle.used += size
            for name, sums in self._observer.sums(runner.read).items():
                total[name] = sums.plus(total.get(name))
            if self._scores:
                self._add_scores(logits, chunk, at)
            at += size
        runner.memory.free(handle)
        return total

    def _add_scores(self, logits: NDArray[np.float32], chunk: NDArray[np.int32], at: int) -> None:
        first, stop = max(len(chunk) // 2 - at, 0), min(len(logits), len(chunk) - 1 - at)

        def negative_log_likelihood(i: int) -> float:
            row = logits[i]
            top = row.max()
            return float(np.log(np.exp(row - top).sum(dtype=np.float64)) + top - row[chunk[at + i + 1]])

        for found in self._pool.map(negative_log_likelihood, range(first, stop)):
            self._nll += found
            self._n += 1


def show(given: Imatrix, output: Callable[[object], None] | None = None) -> None:
    """Print the statistics of each tensor."""
    found = statistics({name: TensorSums(*sums) for name, sums in given.entries.items()})
    table = Table("tensor", *SCHEMA)
    for name, row in sorted(found.items(), key=lambda item: [_number(part) for part in item[0].split(".")]):
        table.add_row(name, *(f"{value:.4g}" if value == value else "" for value in row))
    console = Console(width=None if sys.stdout.isatty() else 250, highlight=False)
    (output or console.print)(table)


def _number(part: str) -> tuple[int, str]:
    return (int(part), "") if part.isdigit() else (-1, part)
