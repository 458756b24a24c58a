"""Prompts and generation without a server: `llamado bench` and the llama-bench of each peer in turns, each time in a
new process, which measures both (behind as many tokens as `--depths` says, that are evaluated once).

usage: speed.py [MODEL …] [--alternations 5 | --quick] [--prompt 512] [--generate 128] [--depths 0] [--threads 2]
                [--peers llama.cpp,ik_llama.cpp] [--before COMMAND] [--flash-attention auto] [--repack 0,1]
                [--json FILE]
MODEL: smollm2, gemma3, synthetic-1b (these three by default), a path, or whatever `llamado -m` takes.
--peers: a peer that is not installed is left out. ik_llama.cpp measures no depth.
--before: the command llamado of an older tree's environment, as one more side.
--flash-attention: the -fa of llama.cpp's llama-bench, --repack: the -rtr of ik_llama.cpp's; with several (auto,0) each
runs in turn, and the faster counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from machine import limits
from machine import table as limits_table
from peer import programs_of
from sides import IK, MODELS, SIDES, measured, model_path, our_command, peer_program

PEERS = (SIDES[1], IK)
_BEFORE = "before"
_TIMEOUT = 3600.0
"""Seconds of a process: llama.cpp takes a quarter of an hour for 32,768 tokens."""


@dataclass
class Row:
    """One test on one model: tokens per second and most bytes of memory by side, in order, and the option that each
    peer was the fastest with; our GB/s or GOP/s at the median.
    """

    model: str
    test: str
    sides: tuple[str, ...]
    tokens_per_second: dict[str, list[float]] = field(default_factory=dict)
    peak_memory: dict[str, list[int]] = field(default_factory=dict)
    options: dict[str, list[str]] = field(default_factory=dict)
    gigabytes_per_token: float | None = None
    gigaops_per_token: float | None = None

    def add(self, side: str, rate: float, peak_memory: int) -> None:
        """Keep a measurement."""
        self.tokens_per_second.setdefault(side, []).append(rate)
        self.peak_memory.setdefault(side, []).append(peak_memory)

    def median(self, side: str) -> float:
        return statistics.median(self.tokens_per_second[side])

    @property
    def ratio(self) -> dict[str, float]:
        """Our median over each peer's."""
        return {peer: self.median(SIDES[0]) / self.median(peer) for peer in self.sides[1:]}

    def summary(self) -> dict[str, Any]:
        """All of it, and what is computed from it."""
        medians = {side: self.median(side) for side in self.sides}
        return {**asdict(self), "median": medians, "ratio": self.ratio}


def of_sides(values: dict[str, float], digits: int = 0) -> str:
    """One figure of each side."""
    return " / ".join(f"{value:,.{digits}f}" for value in values.values())


def table(rows: Sequence[dict[str, Any]], names: Mapping[str, str] | None = None) -> str:
    """A line for each of the rows' summaries, all of the same sides."""
    sides = " / ".join(rows[0]["sides"])
    lines = [f"| model | test | {sides}, tokens/s | ratio | least … most of ours | reached | peak MB |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        median, own = row["median"], row["tokens_per_second"][SIDES[0]]
        reached = ""
        for key, unit, digits in (("gigabytes_per_token", "GB/s", 1), ("gigaops_per_token", "GOP/s", 0)):
            if row[key] is not None:
                reached = f"{of_sides({side: row[key] * rate for side, rate in median.items()}, digits)} {unit}"
        peak = of_sides({side: max(row["peak_memory"][side]) / 1e6 for side in row["sides"]})
        cells = [
            (names or {}).get(row["model"], row["model"]),
            row["test"],
            of_sides(median, 1 if median[SIDES[0]] < 100 else 0),
            " / ".join(f"**{ratio:.2f}**" for ratio in row["ratio"].values()),
            f"{min(own):,.0f} … {max(own):,.0f}",
            reached,
            peak,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def measure_ours(rows: list[Row], side: str, command: Sequence[str], path: Path, test: list[str]) -> None:
    """Run one process of ours, of this tree or the one before; it warms up before each test, then measures once."""
    done = measured([*command, "bench", "-m", str(path), *test, "-r", "1", "-o", "json"], timeout=_TIMEOUT)
    for row, result in zip(rows, json.loads(done.printed), strict=True):
        assert row.test == result["test"]
        rate = result["tokens_per_second"]
        row.add(side, rate, done.peak_memory)
        if result["gigabytes_per_second"] is not None:
            row.gigabytes_per_token = result["gigabytes_per_second"] / rate
        if result["gigaops_per_second"] is not None:
            row.gigaops_per_token = result["gigaops_per_second"] / rate


def measure_theirs(rows: list[Row], peer: str, path: Path, test: list[str], choices: Sequence[list[str]]) -> None:
    """Run a process of a peer's llama-bench with each choice of options; it does the same, and the fastest counts."""
    command = [peer_program("llama-bench", peer), "-m", str(path), *test, "-r", "1", "-o", "json"]
    found: list[list[tuple[float, int, str]]] = [[] for _ in rows]
    for choice in choices:
        done = measured([*command, *choice], timeout=_TIMEOUT)
        for row, rates, result in zip(rows, found, json.loads(done.printed), strict=True):
            assert row.test.startswith(f"pp{result['n_prompt']}" if result["n_prompt"] else f"tg{result['n_gen']}")
            rates.append((result["avg_ts"], done.peak_memory, " ".join(choice)))
    for row, rates in zip(rows, found, strict=True):
        rate, memory, chosen = max(rates)
        row.add(peer, rate, memory)
        row.options.setdefault(peer, []).append(chosen)


def installed(peers: Sequence[str]) -> list[str]:
    """Return the peers that are installed; name the others on stderr. Ends the script if there is none."""
    found = [peer for peer in peers if (programs_of(peer) / "llama-bench").exists()]
    for peer in peers:
        if peer not in found:
            print(f"LEFT OUT: {peer} is not installed: benchmarks/peer.sh {peer}", file=sys.stderr, flush=True)
    if not found:
        sys.exit("no peer is installed")
    return found


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
    parser.add_argument("--peers", default=",".join(PEERS), metavar="PEER,PEER", help="the programs beside ours")
    parser.add_argument("--before", metavar="COMMAND", help="the command llamado of another tree, measured beside this")
    parser.add_argument("--flash-attention", default="auto", metavar="V,V", help="llama.cpp's -fa; the faster counts")
    parser.add_argument("--repack", default="0,1", metavar="V,V", help="ik_llama.cpp's -rtr; the faster counts")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    asked = flags.peers.split(",")
    if unknown := set(asked) - set(PEERS):
        sys.exit(f"--peers: {min(unknown)}: no such peer; there are {', '.join(PEERS)}")
    depths = [int(depth) for depth in flags.depths.split(",")]
    if any(depths) and IK in asked and len(asked) > 1:
        print(f"LEFT OUT: {IK}, whose llama-bench measures no depth", file=sys.stderr, flush=True)
        asked.remove(IK)
    peers = installed(asked)
    sides = (SIDES[0], *([_BEFORE] if flags.before else []), *peers)
    own = {SIDES[0]: our_command(), _BEFORE: [flags.before]}
    choices = {
        SIDES[1]: [["-fa", value] for value in flags.flash_attention.split(",")],
        IK: [["-rtr", value] for value in flags.repack.split(",")],
    }
    machine = limits()
    print(limits_table(machine), end="\n\n", flush=True)
    rows: list[Row] = []
    for name in flags.models or MODELS:
        path = model_path(name)
        for depth in depths:
            behind = f" @ d{depth}" if depth else ""
            tests = {f"pp{flags.prompt}": flags.prompt, f"tg{flags.generate}": flags.generate}
            found = [Row(name, test + behind, sides) for test, n in tests.items() if n]
            rows += found
            options = ["-p", str(flags.prompt), "-n", str(flags.generate), "-t", str(flags.threads)]
            for turn in range(2 if flags.quick else flags.alternations):
                # The order changes, so that no side always finds the machine as the same other one left it.
                for side in sides if turn % 2 == 0 else sides[::-1]:
                    test = options if side == IK else [*options, "-d", str(depth)]
                    if side in own:
                        measure_ours(found, side, own[side], path, test)
                    else:
                        measure_theirs(found, side, path, test, choices[side])
                for row in found:
                    rates = ", ".join(f"{side} {row.tokens_per_second[side][-1]:.1f}" for side in sides)
                    print(f"{name} {row.test} {turn + 1}: {rates} tokens/s", file=sys.stderr, flush=True)
    summaries = [row.summary() for row in rows]
    print(table(summaries))
    if flags.json:
        result = {"limits": machine, "threads": flags.threads, "rows": summaries}
        flags.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
