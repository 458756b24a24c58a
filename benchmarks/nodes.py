"""Cost of slow links by the number of machines: llamado that carries everything itself, llamado whose workers pass
what they compute to the next (the ring), and llama.cpp.

N nodes are a master and N−1 workers of one thread each on this machine, the layers divided evenly among all of them,
every worker behind a tap of ours that delays all messages both ways. A cell is tokens per second of one stream without
drafts: `llamado bench --latency`, and llama-bench.

usage: nodes.py [MODEL] [--latencies 0,5,10,20,30] [--nodes 3,4,5] [--json FILE] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from machine import limits, table
from rpc import THEIRS, listed, workers
from sides import model_path, our_command, peer_program, run

from llamado.cluster.taps import Taps
from llamado.gguf.reader import GGUFFile

KINDS = ("llamado", "llamado, ring", "llama.cpp")
GENERATE = 32
_SECONDS = 1800.0

Rates = dict[str, dict[tuple[int, float], float]]
"""Tokens per second by kind, number of nodes and milliseconds."""


def ours(path: Path, latencies: Sequence[float], nodes: Sequence[int]) -> Rates:
    """Without the ring and with it, in one run."""
    command = our_command("bench", "-m", str(path), "-t", "1", "-n", str(GENERATE), "-r", "1", "-o", "json")
    command += ["--latency", ",".join(map(str, latencies)), "--nodes", ",".join(map(str, nodes))]
    command += ["--compare", "ring", "--both-ways"]
    rows = json.loads(run(command, timeout=_SECONDS))
    return {
        kind: {(row["nodes"], row["latency_ms"]): row["tokens_per_second"][column] for row in rows}
        for kind, column in zip(KINDS, ("plain", "ring"), strict=False)
    }


def theirs(path: Path, latencies: Sequence[float], nodes: Sequence[int]) -> dict[tuple[int, float], float]:
    """llama-bench over ggml's own workers, the master with its share of the layers."""
    with GGUFFile.open(path) as file:
        n_layers = 1 + file.metadata.int_(f"{file.metadata.str_('general.architecture')}.block_count")
    found: dict[tuple[int, float], float] = {}
    for n in nodes:
        with ExitStack() as running:
            endpoints = running.enter_context(workers(THEIRS, n=n - 1))
            taps = Taps(endpoints, both_ways=True)
            running.callback(taps.close)
            command = [peer_program("llama-bench"), "-m", str(path), "-rpc", listed(taps.endpoints), "-t", "1"]
            command += ["-ngl", str(round(n_layers * (n - 1) / n)), "-ts", "/".join("1" for _ in endpoints)]
            command += ["-p", "0", "-n", str(GENERATE), "-r", "1", "-o", "json"]
            for latency in latencies:
                taps.delay(latency)
                (result,) = json.loads(run(command, timeout=_SECONDS))
                found[n, latency] = result["avg_ts"]
    return found


def draw(rates: Mapping[str, Mapping[tuple[int, float], float]], title: str, folder: Path) -> None:
    """Writes `latency.svg`: a panel for each number of nodes."""
    from matplotlib.figure import Figure

    nodes = sorted({n for n, _ in rates[KINDS[0]]})
    figure = Figure(figsize=(3.4 * len(nodes), 3.6), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(nodes), sharey=True, squeeze=False)[0]
    for n, axes in zip(nodes, panels, strict=True):
        for kind in KINDS:
            points = sorted((latency, rate) for (of, latency), rate in rates[kind].items() if of == n)
            axes.plot(*zip(*points, strict=True), marker="o", label=kind)
        axes.set_title(f"{n} nodes")
        axes.set_xlabel("delay each way, ms")
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
    panels[0].set_ylabel("tokens per second, one stream")
    panels[-1].legend()
    figure.savefig(folder / "latency.svg")


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--latencies", default="0,5,10,20,30")
    parser.add_argument("--nodes", default="3,4,5")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--out", type=Path, help="folder for the picture")
    flags = parser.parse_args()
    latencies, nodes = [float(t) for t in flags.latencies.split(",")], [int(t) for t in flags.nodes.split(",")]
    path = model_path(flags.model)
    print(table(limits()), flush=True)
    rates: Rates = ours(path, latencies, nodes) | {KINDS[2]: theirs(path, latencies, nodes)}
    print(f"\n| nodes | delay each way, ms | {' | '.join(KINDS)} | ring / without | ring / llama.cpp |")
    print("|---:|---:|" + "---:|" * 5)
    for n in nodes:
        for latency in latencies:
            plain, ring, peer = (rates[kind][n, latency] for kind in KINDS)
            cells = [f"{n}", f"{latency:g}", *(f"{rate:.1f}" for rate in (plain, ring, peer))]
            print(f"| {' | '.join([*cells, f'{ring / plain:.2f}', f'{ring / peer:.2f}'])} |")
    if flags.json:
        flat = {kind: [[*cell, rate] for cell, rate in found.items()] for kind, found in rates.items()}
        flags.json.write_text(json.dumps(flat, indent=1) + "\n")
    if flags.out:
        draw(rates, f"{flags.model}: tokens per second over slow links", flags.out)


if __name__ == "__main__":
    main()
