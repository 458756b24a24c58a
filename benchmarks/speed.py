"""Prompts and generation without a server: `llamado bench` and llama-bench in turns, each time in a new process, which
measures both (behind as many tokens as `--depths` says, that are evaluated once).

usage: speed.py [MODEL …] [--alternations 5 | --quick] [--prompt 512] [--generate 128] [--depths 0] [--threads 2]
                [--flash-attention auto] [--json FILE]
MODEL: smollm2, gemma3, synthetic-1b (these three by default), a path, or whatever `llamado -m` takes.
--flash-attention: llama-bench's -fa; with several (auto,0) each runs in turn, and the faster counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import limits, table
from sides import MODELS, SIDES, measured, model_path, our_command, peer_program

_TIMEOUT = 3600.0
"""Seconds of a process: llama.cpp takes a quarter of an hour for 32,768 tokens."""


@dataclass
class Row:
    """One test on one model: tokens per second and most bytes of memory by side, in order, and the -fa that llama.cpp
    was the fastest with; our GB/s or GOP/s at the median.
    """

    model: str
    test: str
    tokens_per_second: dict[str, list[float]] = field(default_factory=lambda: {side: [] for side in SIDES})
    peak_memory: dict[str, list[int]] = field(default_factory=lambda: {side: [] for side in SIDES})
    flash_attention: list[str] = field(default_factory=list)
    gigabytes_per_token: float | None = None
    gigaops_per_token: float | None = None

    def median(self, side: str) -> float:
        return statistics.median(self.tokens_per_second[side])

    @property
    def ratio(self) -> float:
        """Our median over theirs."""
        return self.median(SIDES[0]) / self.median(SIDES[1])

    def summary(self) -> dict[str, Any]:
        """All of it, and what is computed from it."""
        medians = {side: self.median(side) for side in SIDES}
        return {**asdict(self), "median": medians, "ratio": self.ratio}

    def line(self) -> str:
        """One line of the table."""
        cells = [self.model, self.test]
        for side in SIDES:
            rates = self.tokens_per_second[side]
            cells.append(f"{self.median(side):.1f} ({min(rates):.1f} … {max(rates):.1f})")
        cells.append(f"**{self.ratio:.2f}**")
        cells.append(" / ".join(f"{max(self.peak_memory[side]) / 1e6:.0f}" for side in SIDES))
        if self.gigabytes_per_token is not None:
            reached = [f"{self.gigabytes_per_token * self.median(side):.1f}" for side in SIDES]
            cells.append(f"{' / '.join(reached)} GB/s")
        elif self.gigaops_per_token is not None:
            reached = [f"{self.gigaops_per_token * self.median(side):.0f}" for side in SIDES]
            cells.append(f"{' / '.join(reached)} GOP/s")
        return f"| {' | '.join(cells)} |"


HEADER = """| model | test | llamado tokens/s | llama.cpp tokens/s | ratio | peak MB | reached, llamado / llama.cpp |
|---|---|---:|---:|---:|---:|---:|"""


def measure_ours(rows: list[Row], path: Path, test: list[str]) -> None:
    """One process of ours; it warms up before each test, then measures once."""
    done = measured(our_command("bench", "-m", str(path), *test, "-r", "1", "-o", "json"), timeout=_TIMEOUT)
    for row, result in zip(rows, json.loads(done.printed), strict=True):
        assert row.test == result["test"]
        row.peak_memory["llamado"].append(done.peak_memory)
        rate = result["tokens_per_second"]
        row.tokens_per_second["llamado"].append(rate)
        if result["gigabytes_per_second"] is not None:
            row.gigabytes_per_token = result["gigabytes_per_second"] / rate
        if result["gigaops_per_second"] is not None:
            row.gigaops_per_token = result["gigaops_per_second"] / rate


def measure_theirs(rows: list[Row], path: Path, test: list[str], flash_attention: Sequence[str]) -> None:
    """A process of llama-bench for each value of its -fa; it does the same."""
    command = [peer_program("llama-bench"), "-m", str(path), *test, "-r", "1", "-o", "json"]
    found: list[list[tuple[float, int, str]]] = [[] for _ in rows]
    for choice in flash_attention:
        done = measured([*command, "-fa", choice], timeout=_TIMEOUT)
        for row, rates, result in zip(rows, found, json.loads(done.printed), strict=True):
            assert row.test.startswith(f"pp{result['n_prompt']}" if result["n_prompt"] else f"tg{result['n_gen']}")
            rates.append((result["avg_ts"], done.peak_memory, choice))
    for row, rates in zip(rows, found, strict=True):
        rate, memory, choice = max(rates)
        row.tokens_per_second["llama.cpp"].append(rate)
        row.peak_memory["llama.cpp"].append(memory)
        row.flash_attention.append(choice)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 alternations")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--generate", type=int, default=128)
    parser.add_argument("--depths", default="0", metavar="N,N", help="tokens that each test begins behind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--flash-attention", default="auto", metavar="V,V", help="llama-bench's -fa; the faster counts")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    machine = limits()
    print(table(machine), end="\n\n", flush=True)
    rows: list[Row] = []
    print(HEADER, flush=True)
    for name in flags.models or MODELS:
        path = model_path(name)
        for depth in map(int, flags.depths.split(",")):
            behind = f" @ d{depth}" if depth else ""
            tests = {f"pp{flags.prompt}": flags.prompt, f"tg{flags.generate}": flags.generate}
            found = [Row(name, test + behind) for test, n in tests.items() if n]
            rows += found
            options = ["-p", str(flags.prompt), "-n", str(flags.generate)]
            options += ["-t", str(flags.threads), "-d", str(depth)]
            for turn in range(2 if flags.quick else flags.alternations):
                # Who goes first changes, so that neither always finds the machine as the other left it.
                for side in SIDES if turn % 2 == 0 else SIDES[::-1]:
                    if side == SIDES[0]:
                        measure_ours(found, path, options)
                    else:
                        measure_theirs(found, path, options, flags.flash_attention.split(","))
                for row in found:
                    both = " and ".join(f"{row.tokens_per_second[side][-1]:.1f}" for side in SIDES)
                    print(f"{name} {row.test} {turn + 1}: {both} tokens/s", file=sys.stderr, flush=True)
            for row in found:
                print(row.line(), flush=True)
    if flags.json:
        result = {"limits": machine, "threads": flags.threads, "rows": [row.summary() for row in rows]}
        flags.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
