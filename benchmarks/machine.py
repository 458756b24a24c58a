"""Limits of this machine: reading memory and caches, which limits decode, and products in the cache, which limit
prefill; by the kernels of `llamado bench --roofline`.

usage: machine.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from llamado.commands.bench.machine import Machine, beyond_caches, caches, thread_counts
from llamado.commands.plan import processor
from llamado.devices import limits as given


def sizes(found: dict[int, int]) -> dict[str, int]:
    """Bytes that are read, by where they lie then: half of the second cache, a part of the third, and memory."""
    levels = sorted(found)
    places = {"memory": beyond_caches(found)}
    for level in levels[1:]:
        # of the last cache, which others share, more than the one before holds and much less than all of it
        size = found[level] // 2 if level < levels[-1] else max(4 * found[levels[-2]], found[level] // 8)
        places[f"L{level}"] = size
    return places


def measure() -> dict[str, Any]:
    """All of it: figures per second, by number of threads."""
    machine, threads, found = Machine(), thread_counts(), caches()
    places = sizes(found)
    return {
        "processor": processor(),
        "cores": given.cores(),
        "memory_bytes": given.memory().physical,
        "lowering": machine.lowering,
        "caches": {f"L{level}": size for level, size in found.items()},
        "read_sizes": places,
        "read": {where: {n: machine.read_bandwidth(size, n) for n in threads} for where, size in places.items()},
        "integer": {32 * lanes: {n: machine.integer_products(n, lanes) for n in threads} for lanes in machine.widths},
        "tiles": {n: machine.tile_products(n) for n in threads} if machine.tiles else None,
        "floats": {32 * lanes: {n: machine.float_products(n, lanes) for n in threads} for lanes in machine.widths},
    }


def limits() -> dict[str, Any]:
    """Measure in another process, because children inherit this one's peak memory. Return JSON types."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found: dict[str, Any] = json.loads(json.dumps(pool.submit(measure).result()))
    return found


def rows(measured: dict[str, Any]) -> list[tuple[str, dict[str, float], str]]:
    """The limited resource, figures in billions by number of threads, and their unit."""
    found = []
    for where, by_threads in measured["read"].items():
        size = measured["read_sizes"][where] / (1 << 10)
        of = f"{size / 1024:,.0f} MiB" if size >= 1024 else f"{size:.0f} KiB"
        found.append((f"reading {where} ({of})", by_threads, "GB/s"))
    for what, key in (("8-bit products in L1", "integer"), ("float32 multiply-adds of registers", "floats")):
        for bits, by_threads in measured[key].items():
            found.append((f"{what}, {bits} bits wide", by_threads, "GOP/s"))
    if measured["tiles"]:
        found.append(("8-bit products of tile registers (AMX)", measured["tiles"], "GOP/s"))
    return [(what, {n: 1e-9 * value for n, value in by.items()}, unit) for what, by, unit in found]


def table(measured: dict[str, Any]) -> str:
    """A line of each limit."""
    found = rows(measured)
    counts = list(found[0][1])
    lines = [f"| limit | {' | '.join(n + (' thread' if n == '1' else ' threads') for n in counts)} | |"]
    lines.append(f"|---|{'---:|' * len(counts)}---|")
    for what, by_threads, unit in found:
        digits = 1 if unit == "GB/s" else 0
        lines.append(f"| {what} | {' | '.join(f'{by_threads[n]:.{digits}f}' for n in counts)} | {unit} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    measured = limits()
    print(table(measured))
    if flags.json:
        flags.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
