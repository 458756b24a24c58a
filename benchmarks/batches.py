"""Sequences that generate at once: `llamado bench -npl` and llama-batched-bench in turns, each time in a new process.

Both read a short prompt for each sequence and then generate a token of all of them in every step. A rate is of all
sequences; a bold one has fallen behind what fewer sequences got.

usage: batches.py [MODEL …] [--parallel 1,2,4,8,9,16,32,64] [--alternations 3 | --quick] [--prompt 32] [--generate 32]
                  [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from sides import SIDES, model_path, our_command, peer_program, run

MODELS = ("smollm2", "synthetic-1b")
_TIMEOUT = 1800.0
_TOLERANCE = 0.98
"""A rate that has fallen by less than this share of the best before may be chance."""


def ours(path: Path, flags: argparse.Namespace) -> dict[int, float]:
    """Tokens per second of generation, by number of sequences."""
    options = ["-npl", flags.parallel, "-p", str(flags.prompt), "-n", str(flags.generate), "-t", str(flags.threads)]
    printed = run(our_command("bench", "-m", str(path), *options, "-r", "1", "-o", "json"), timeout=_TIMEOUT)
    return {row["pl"]: row["speed_tg"] for row in json.loads(printed)}


def theirs(path: Path, flags: argparse.Namespace) -> dict[int, float]:
    """The same of llama-batched-bench, with room for as many tokens as they have."""
    room = max(map(int, flags.parallel.split(","))) * (flags.prompt + flags.generate)
    options = ["-npl", flags.parallel, "-npp", str(flags.prompt), "-ntg", str(flags.generate), "-t", str(flags.threads)]
    command = [peer_program("llama-batched-bench"), "-m", str(path), "-c", str(room), *options]
    printed = run([*command, "--output-format", "jsonl"], timeout=_TIMEOUT)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {row["pl"]: row["speed_tg"] for row in rows}


def row_of(model: str, n: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Rates of both sides, their medians and the ratio."""
    medians = {side: statistics.median(values) for side, values in rates.items()}
    return {
        "model": model,
        "sequences": n,
        "tokens_per_second": rates,
        "median": medians,
        "ratio": medians[SIDES[0]] / medians[SIDES[1]],
    }


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each number of sequences."""
    lines = ["| model | sequences | llamado tokens/s in all | llama.cpp | ratio |", "|---|---:|---:|---:|---:|"]
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        cells = []
        for side in SIDES:
            rate, before = row["median"][side], best.get((row["model"], side), 0.0)
            best[row["model"], side] = max(rate, before)
            cells.append(f"**{rate:.0f}** ↓" if rate < _TOLERANCE * before else f"{rate:.0f}")
        lines.append(f"| {row['model']} | {row['sequences']} | {' | '.join(cells)} | **{row['ratio']:.1f}** |")
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--parallel", default="1,2,4,8,9,16,32,64", metavar="N,N", help="numbers of sequences")
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 alternation")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--generate", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in flags.models or MODELS:
        path = model_path(name)
        found: dict[str, list[dict[int, float]]] = {side: [] for side in SIDES}
        for turn in range(1 if flags.quick else flags.alternations):
            sides = dict(zip(SIDES, (ours, theirs), strict=True))
            for side in SIDES if turn % 2 == 0 else reversed(SIDES):
                found[side].append(sides[side](path, flags))
                print(f"{name} {side} {turn + 1}: {found[side][-1]}", file=sys.stderr, flush=True)
        for n in found[SIDES[0]][0]:
            rows.append(row_of(name, n, {side: [each[n] for each in found[side]] for side in SIDES}))
    print(table(rows))
    if flags.json:
        flags.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
