"""`llamado bench --roofline`: what kernels of a prompt and of a token reach, beside what this machine can do.

A pass must read its weights, keys and values, and compute its products; how long that takes at least the limits of the
machine say, measured in the same minute (`machine.py`): bytes at the speed of reading as many, operations at that of
products in the cache. "Of limit" is the longer of the two over the time it took. What chains of row operations move is
activations, which stay in the cache: they have a time alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llamado.commands.bench.speed import TestLengths, measured_model, test_name
from llamado.flags import FlagError, Parsed
from llamado.ggml.ops import Op
from llamado.gguf.types import TensorType
from llamado.terminal.text import print

if TYPE_CHECKING:
    from rich.table import Table

    from llamado.commands.bench.machine import Machine
    from llamado.devices.device import OperationTime
    from llamado.engine.loaded_model import LoadedModel
    from llamado.ggml.graph import Graph
    from llamado.ggml.tensor import Tensor

REST = "norms and the rest"
ATTENTION = "attention"

MaskOf = Callable[["Tensor"], "np.ndarray[tuple[int, ...], np.dtype[np.float16]]"]


class PassWork(NamedTuple):
    """What an operation must move and compute: bytes of weights, keys and values; multiplications and additions."""

    n_bytes: int = 0
    integer: int = 0
    """Of 8-bit integers."""
    floats: int = 0

    def plus(self, other: PassWork) -> PassWork:
        return PassWork(self.n_bytes + other.n_bytes, self.integer + other.integer, self.floats + other.floats)


class Peaks(NamedTuple):
    """Bytes and operations per second that the machine can do at most."""

    read: float
    integer: float
    floats: float

    def seconds(self, work: PassWork) -> float:
        """What work takes at least."""
        return max(work.n_bytes / self.read, work.integer / self.integer + work.floats / self.floats)


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one kind in a pass."""

    kernel: str
    n: int
    seconds: float
    """Of all threads' time, waiting for each other included."""
    work: PassWork
    least: float
    """Seconds that the limits of the machine ask for."""

    @property
    def of_limit(self) -> float | None:
        """None where nothing is counted."""
        return self.least / self.seconds if self.least and self.seconds else None


# --- what a graph asks for --------------------------------------------------------------------------------------------


def product_work(node: Tensor) -> PassWork:
    """Of MUL_MAT, or MUL_MAT_ID, which reads the experts that are chosen: as many as there are choices, at most all."""
    w = node.src[0]
    assert w is not None
    n_bytes = w.nbytes
    if node.op is Op.MUL_MAT_ID:
        ids = node.src[2]
        assert ids is not None
        n_bytes = n_bytes // w.ne[2] * min(w.ne[2], ids.nelements)
    operations = 2 * w.ne[0] * node.nelements
    return PassWork(n_bytes, operations, 0) if w.type.block_size > 1 else PassWork(n_bytes, 0, operations)


def attention_work(node: Tensor, mask_of: MaskOf) -> PassWork:
    """Of FLASH_ATTN_EXT, which goes only to cells that a token of the batch sees."""
    q, k, v, mask = node.src[0], node.src[1], node.src[2], node.source(3)
    assert q is not None and k is not None and v is not None
    cells = pairs = k.ne[1] * k.ne[3]
    pairs *= q.ne[1]
    heads = q.ne[2]
    if mask is not None:
        seen = mask_of(mask) > -np.inf  # [streams, heads or 1, tokens, cells]
        cells = int(seen.any(axis=2).sum()) // seen.shape[1]
        pairs = int(seen.sum()) // seen.shape[1]
    within = v.root()[0] is k.root()[0] and v.root()[1] == k.root()[1]  # latent rows: values are a part of the keys
    cell = k.type.row_bytes(k.ne[0]) * k.ne[2] + (0 if within else v.type.row_bytes(v.ne[0]) * v.ne[2])
    return PassWork(cells * cell, 0, 2 * pairs * heads * (k.ne[0] + v.ne[0]))


def kinds(graph: Graph, mask_of: MaskOf) -> tuple[dict[str, str], dict[str, PassWork]]:
    """The kind of each label that products have in a profile, and the work of each kind."""
    labels: dict[str, str] = {}
    work: dict[str, PassWork] = {}
    for node in graph.nodes:
        if node.op in (Op.MUL_MAT, Op.MUL_MAT_ID):
            w = node.src[0]
            assert w is not None
            kind = f"{w.type.name} {'products' if node.op is Op.MUL_MAT else 'experts'}"
            labels[f"{w.type.name} {w.name}"] = kind
            work[kind] = work.get(kind, PassWork()).plus(product_work(node))
        elif node.op is Op.FLASH_ATTN_EXT:
            work[ATTENTION] = work.get(ATTENTION, PassWork()).plus(attention_work(node, mask_of))
    return labels, work


def rows_of(graph: Graph, operations: Iterable[OperationTime], mask_of: MaskOf, peaks: Peaks) -> list[KernelRow]:
    """A row for each kind of kernel, those that take longest first, and behind them one for the rest."""
    labels, work = kinds(graph, mask_of)
    seconds: dict[str, list[float]] = {}
    for operation in operations:
        kind = ATTENTION if operation.label.startswith(ATTENTION) else labels.get(operation.label, REST)
        seconds.setdefault(kind, []).append(operation.work + operation.wait)
    rows = []
    for kind, times in seconds.items():
        done = work.get(kind, PassWork())
        rows.append(KernelRow(kind, len(times), sum(times), done, peaks.seconds(done)))
    return sorted(rows, key=lambda row: (row.kernel == REST, -row.seconds))


def in_all(rows: Sequence[KernelRow]) -> KernelRow:
    """The whole pass."""
    work = PassWork()
    for row in rows:
        work = work.plus(row.work)
    return KernelRow("in all", sum(r.n for r in rows), sum(r.seconds for r in rows), work, sum(r.least for r in rows))


# --- the command ------------------------------------------------------------------------------------------------------


def measured_pass(
    llama: LoadedModel, machine: Machine, n: int, start: int, repetitions: int, threads: int
) -> tuple[list[KernelRow], Peaks]:
    """Profile a pass of `n` tokens behind `start`, then the machine: reading as many bytes as the pass does."""
    from llamado.engine.forward.runner import ModelRunner

    runner = llama.forward
    assert isinstance(runner, ModelRunner)
    profile = runner.profile(min(n, runner.max_batch), start, repetitions)

    def mask_of(mask: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
        if mask.type is not TensorType.F16 or not mask.is_contiguous():
            raise FlagError(f"--roofline: a mask of {mask.type.name} is not understood")
        data = runner.devices[0].read(mask, 0, mask.nbytes).result()
        return data.view(np.float16).reshape(mask.ne[::-1])

    n_bytes = sum(work.n_bytes for work in kinds(profile.graph, mask_of)[1].values())
    peaks = Peaks(
        read=machine.read_bandwidth(n_bytes, threads),
        integer=max(machine.tile_products(threads), *(machine.integer_products(threads, w) for w in machine.widths)),
        floats=max(machine.float_products(threads, lanes) for lanes in machine.widths),
    )
    return rows_of(profile.graph, profile.operations, mask_of, peaks), peaks


def bench_roofline(flags: Parsed) -> int:
    """The command. Raises LlamadoError."""
    from llamado.commands.bench.machine import Machine
    from llamado.devices import limits

    lengths = TestLengths.of(flags)
    found: list[tuple[str, list[KernelRow], Peaks]] = []
    with measured_model(flags, lengths.longest) as (source, options, llama):
        machine = Machine()
        threads = options.n_threads or limits.cores()
        batch_threads = options.n_threads_batch or threads
        for depth in lengths.depths:
            for n in lengths.prompts:
                measured = measured_pass(llama, machine, n, depth, flags.repetitions, batch_threads)
                found.append((test_name("pp", n, depth), *measured))
            for n in lengths.generations:
                measured = measured_pass(llama, machine, 1, depth + n - 1, flags.repetitions, threads)
                found.append((test_name("tg", n, depth), *measured))
    if flags.output == "json":
        print(json.dumps([_as_json(source.name, *one) for one in found], indent=2))
        return 0
    if not sys.stdout.isatty():
        print("\n\n".join(markdown(*one) for one in found))
        return 0
    from llamado.terminal.console import Console

    console = Console()
    for one in found:
        console.print(table(*one))
    return 0


def _as_json(model: str, test: str, rows: list[KernelRow], peaks: Peaks) -> dict[str, object]:
    shown = [{**asdict(row), "work": row.work._asdict(), "of_limit": row.of_limit} for row in [*rows, in_all(rows)]]
    return {"model": model, "test": test, "limits": peaks._asdict(), "kernels": shown}


HEADER = ("kernels", "times", "ms", "share", "MB", "GB/s", "GOP", "GOP/s", "of limit")


def cells(row: KernelRow, whole: float) -> tuple[str, ...]:
    """A line of the table; `whole`: seconds of the pass."""
    read, computed = row.work.n_bytes, row.work.integer + row.work.floats
    shown = [row.kernel, str(row.n), f"{1e3 * row.seconds:.2f}", f"{row.seconds / whole:.0%}"]
    shown += [f"{1e-6 * read:.1f}", f"{1e-9 * read / row.seconds:.1f}"] if read else ["", ""]
    shown += [f"{1e-9 * computed:.2f}", f"{1e-9 * computed / row.seconds:.0f}"] if computed else ["", ""]
    return (*shown, "" if row.of_limit is None else f"{row.of_limit:.0%}")


def title(test: str, peaks: Peaks) -> str:
    """What the table is of, and the limits."""
    return (
        f"{test}; limits: {1e-9 * peaks.read:.1f} GB/s of reading as many bytes, {1e-9 * peaks.integer:.0f} GOP/s of "
        f"8-bit products, {1e-9 * peaks.floats:.0f} of floats"
    )


def markdown(test: str, rows: list[KernelRow], peaks: Peaks) -> str:
    """The table for a file."""
    lines = [title(test, peaks), "", f"| {' | '.join(HEADER)} |", f"|---|{'---:|' * (len(HEADER) - 1)}"]
    whole = in_all(rows)
    lines += [f"| {' | '.join(cells(row, whole.seconds))} |" for row in [*rows, whole]]
    return "\n".join(lines)


def table(test: str, rows: list[KernelRow], peaks: Peaks) -> Table:
    """The table for a terminal."""
    from rich.table import Table

    shown = Table(title=title(test, peaks), title_justify="left", title_style="bold")
    for i, name in enumerate(HEADER):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    whole = in_all(rows)
    for row in rows:
        shown.add_row(*cells(row, whole.seconds))
    shown.add_section()
    shown.add_row(*cells(whole, whole.seconds))
    return shown
