"""`llamado bench --roofline`: speed of the kernels of a prompt and of a token, relative to this machine's limits.

A forward pass must read its weights, keys and values, and compute its products. The limits of the machine, measured in
the same run (`machine.py`), give a minimum time for both: the bytes at the bandwidth for as many bytes, the operations
at the speed of products in the cache. "Of limit" is the larger minimum divided by the measured time. Chains of row
operations have a time only, because their activations stay in the cache.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llamado.commands.bench.speed import TestLengths, measured_model, test_name
from llamado.flags import FlagError, ParsedFlags
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
    """Minimum work of an operation: bytes of weights, keys and values to read; multiplications and additions."""

    n_bytes: int = 0
    integer: int = 0
    """Operations on 8-bit integers."""
    floats: int = 0

    def plus(self, other: PassWork) -> PassWork:
        return PassWork(self.n_bytes + other.n_bytes, self.integer + other.integer, self.floats + other.floats)


class Peaks(NamedTuple):
    """Limits of the machine: bytes and operations per second."""

    read: float
    integer: float
    floats: float

    def seconds(self, work: PassWork) -> float:
        """Return the minimum seconds for some work."""
        return max(work.n_bytes / self.read, work.integer / self.integer + work.floats / self.floats)


@dataclass(frozen=True)
class KernelRow:
    """All kernels of one kind in a forward pass."""

    kernel: str
    n: int
    seconds: float
    """Time of all threads, including the time they wait for each other."""
    work: PassWork
    least: float
    """Minimum seconds by the limits of the machine."""

    @property
    def of_limit(self) -> float | None:
        """Minimum time as a share of the measured time; None if no work is counted."""
        return self.least / self.seconds if self.least and self.seconds else None


# --- work of a graph --------------------------------------------------------------------------------------------------


def product_work(node: Tensor) -> PassWork:
    """Return the work of MUL_MAT or MUL_MAT_ID, which reads one expert per selection, at most all."""
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
    """Return the work of FLASH_ATTN_EXT, which reads only cells visible to a token of the batch."""
    q, k, v, mask = node.src[0], node.src[1], node.src[2], node.source(3)
    assert q is not None and k is not None and v is not None
    cells = pairs = k.ne[1] * k.ne[3]
    pairs *= q.ne[1]
    heads = q.ne[2]
    if mask is not None:
        seen = mask_of(mask) > -np.inf  # [streams, heads or 1, tokens, cells]
        cells = int(seen.any(axis=2).sum()) // seen.shape[1]
        pairs = int(seen.sum()) // seen.shape[1]
    # In latent attention the values are a part of the keys.
    within = v.root()[0] is k.root()[0] and v.root()[1] == k.root()[1]
    cell = k.type.row_bytes(k.ne[0]) * k.ne[2] + (0 if within else v.type.row_bytes(v.ne[0]) * v.ne[2])
    return PassWork(cells * cell, 0, 2 * pairs * heads * (k.ne[0] + v.ne[0]))


def kinds(graph: Graph, mask_of: MaskOf) -> tuple[dict[str, str], dict[str, PassWork]]:
    """Return the kernel kind of each label of products in a profile, and the work of each kind."""
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
    """Return a row for each kind of kernel, the slowest first, and finally one for the other operations."""
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


def total(rows: Sequence[KernelRow]) -> KernelRow:
    """Return the row of the whole forward pass."""
    work = PassWork()
    for row in rows:
        work = work.plus(row.work)
    return KernelRow("total", sum(r.n for r in rows), sum(r.seconds for r in rows), work, sum(r.least for r in rows))


# --- the command ------------------------------------------------------------------------------------------------------


def measured_pass(
    llama: LoadedModel, machine: Machine, n: int, start: int, repetitions: int, threads: int
) -> tuple[list[KernelRow], Peaks]:
    """Profile a pass of `n` tokens after `start` tokens, then the machine reading as many bytes as the pass."""
    from llamado.engine.forward.runner import ModelRunner

    runner = llama.forward
    assert isinstance(runner, ModelRunner)
    profile = runner.profile(min(n, runner.max_batch), start, repetitions)

    def mask_of(mask: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float16]]:
        if mask.type is not TensorType.F16 or not mask.is_contiguous():
            raise FlagError(f"--roofline: attention masks of type {mask.type.name} are not supported")
        data = runner.devices[0].read(mask, 0, mask.nbytes).result()
        return data.view(np.float16).reshape(mask.ne[::-1])

    n_bytes = sum(work.n_bytes for work in kinds(profile.graph, mask_of)[1].values())
    peaks = Peaks(
        read=machine.read_bandwidth(n_bytes, threads),
        integer=max(machine.tile_products(threads), *(machine.integer_products(threads, w) for w in machine.widths)),
        floats=max(machine.float_products(threads, lanes) for lanes in machine.widths),
    )
    return rows_of(profile.graph, profile.operations, mask_of, peaks), peaks


def bench_roofline(flags: ParsedFlags) -> int:
    """Run the command. Raises LlamadoError."""
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
    shown = [{**asdict(row), "work": row.work._asdict(), "of_limit": row.of_limit} for row in [*rows, total(rows)]]
    return {"model": model, "test": test, "limits": peaks._asdict(), "kernels": shown}


HEADER = ("kernels", "times", "ms", "share", "MB", "GB/s", "GOP", "GOP/s", "of limit")


def cells(row: KernelRow, whole: float) -> tuple[str, ...]:
    """Return the cells of a row. `whole`: seconds of the whole pass."""
    read, computed = row.work.n_bytes, row.work.integer + row.work.floats
    shown = [row.kernel, str(row.n), f"{1e3 * row.seconds:.2f}", f"{row.seconds / whole:.0%}"]
    shown += [f"{1e-6 * read:.1f}", f"{1e-9 * read / row.seconds:.1f}"] if read else ["", ""]
    shown += [f"{1e-9 * computed:.2f}", f"{1e-9 * computed / row.seconds:.0f}"] if computed else ["", ""]
    return (*shown, "" if row.of_limit is None else f"{row.of_limit:.0%}")


def title(test: str, peaks: Peaks) -> str:
    """Return the title of a table: the test and the limits."""
    return (
        f"{test}; limits: {1e-9 * peaks.read:.1f} GB/s reading as many bytes, {1e-9 * peaks.integer:.0f} GOP/s of "
        f"8-bit products, {1e-9 * peaks.floats:.0f} of floats"
    )


def markdown(test: str, rows: list[KernelRow], peaks: Peaks) -> str:
    """Return the table in Markdown."""
    lines = [title(test, peaks), "", f"| {' | '.join(HEADER)} |", f"|---|{'---:|' * (len(HEADER) - 1)}"]
    whole = total(rows)
    lines += [f"| {' | '.join(cells(row, whole.seconds))} |" for row in [*rows, whole]]
    return "\n".join(lines)


def table(test: str, rows: list[KernelRow], peaks: Peaks) -> Table:
    """Return the table for a terminal."""
    from rich.table import Table

    shown = Table(title=title(test, peaks), title_justify="left", title_style="bold")
    for i, name in enumerate(HEADER):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    whole = total(rows)
    for row in rows:
        shown.add_row(*cells(row, whole.seconds))
    shown.add_section()
    shown.add_row(*cells(whole, whole.seconds))
    return shown
