"""The parts of `all.py`: which script each one runs, and what table its result becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import batches
import latency
import machine
import sessions
import speed
import steps
import stream
from sides import SIDES
from speed import of_sides

NAMES = {
    "smollm2": "SmolLM2 135M Q4_1",
    "gemma3": "Gemma 3 270M Q4_K_M",
    "synthetic-1b": "synthetic 1B Q4_K_M",
    "synthetic-a3b-4": "synthetic experts Q4_K_M",
}


def speed_table(result: dict[str, Any]) -> str:
    """Of `speed.py`."""
    return speed.table(result["rows"], NAMES)


def batches_table(result: dict[str, Any]) -> str:
    """Of `batches.py`."""
    return batches.table(result["rows"])


def front_table(speed: dict[str, Any], serving: dict[str, Any] | None) -> str:
    """The summary of the project's first page; of answers over HTTP if they are measured."""
    models = [name for name in NAMES if any(row["model"] == name for row in speed["rows"])]
    names = " | ".join(NAMES[name] for name in models)
    lines = [f"| llamado / the other, tokens/s = ratio | {names} |", f"|---|{'---:|' * len(models)}"]
    for peer in speed["rows"][0]["ratio"]:
        for test, what in (("pp512", "prompt, 512 tokens"), ("tg128", "generation, 128 tokens")):
            rows = {row["model"]: row for row in speed["rows"] if row["test"] == test}
            pairs = {name: {side: row["median"][side] for side in (SIDES[0], peer)} for name, row in rows.items()}
            cells = [(pairs[name], rows[name]["ratio"][peer]) for name in models]
            lines.append(_front(f"{what}, {peer}", cells))
    if serving is not None:
        most = max((row["clients"] for row in serving["rows"]), default=0)
        at_once = {row["model"]: row for row in serving["rows"] if row["clients"] == most}
        cells = [
            (
                {side: at_once[name][side]["tokens_per_second"] for side in SIDES},
                at_once[name]["ratio"]["tokens_per_second"],
            )
            for name in models
        ]
        lines.append(_front(f"{most} clients over HTTP, {SIDES[1]}", cells))
    return "\n".join(lines)


def _front(what: str, cells: Sequence[tuple[dict[str, float], float]]) -> str:
    shown = [f"{of_sides(rates, 0 if rates[SIDES[0]] >= 100 else 1)} = **{ratio:.1f}**" for rates, ratio in cells]
    return f"| {what} | {' | '.join(shown)} |"


def serving_table(result: dict[str, Any]) -> str:
    """Of `serving.py`."""
    lines = ["| model | clients | tokens/s in all, llamado / llama.cpp | ratio | time to first token, ms | ratio |"]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for row in result["rows"]:
        rates = of_sides({side: row[side]["tokens_per_second"] for side in SIDES})
        first = of_sides({side: row[side]["ttft_p50_ms"] for side in SIDES})
        ratio, sooner = row["ratio"]["tokens_per_second"], row["ratio"]["ttft_p50_ms"]
        model = NAMES.get(row["model"], row["model"])
        lines.append(f"| {model} | {row['clients']} | {rates} | **{ratio:.1f}** | {first} | {sooner:.2f} |")
    return "\n".join(lines)


def startup_table(result: dict[str, Any]) -> str:
    """Of `startup.py`."""
    lines = ["| model | start, llamado / llama.cpp, s | no kernels compiled yet, s | peak memory, MB | difference |"]
    lines.append("|---|---:|---:|---:|---:|")
    for row in result["rows"]:
        start = {side: middle(row["start_seconds"][side]) for side in SIDES}
        peak = {side: middle(row["peak_megabytes"][side]) for side in SIDES}
        more = peak[SIDES[0]] - peak[SIDES[1]]
        cells = [NAMES.get(row["model"], row["model"]), of_sides(start, 2), f"{row['cold_start_seconds']:.1f}"]
        lines.append(f"| {' | '.join([*cells, of_sides(peak), f'{more:+.0f}'])} |")
    return "\n".join(lines)


def stream_table(result: dict[str, Any]) -> str:
    """Of `stream.py`."""
    return stream.table(result["rows"])


def latency_table(result: dict[str, Any]) -> str:
    """Of `latency.py`."""
    return latency.table(result["rows"])


def steps_table(result: dict[str, Any]) -> str:
    """Of `steps.py`."""
    return steps.table(result["rows"])


def roofline_table(result: dict[str, Any]) -> str:
    """Of `roofline.py`."""
    lines = []
    for test in result["tests"]:
        limits = test["limits"]
        lines += [
            f"{NAMES.get(test['model'], test['model'])}, {test['test']}; limits: {1e-9 * limits['read']:.1f} GB/s, "
            f"{1e-9 * limits['integer']:.0f} GOP/s of 8-bit products, {1e-9 * limits['floats']:.0f} of floats",
            "",
            "| kernels | ms | share | GB/s | GOP/s | of limit |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        whole = test["kernels"][-1]["seconds"]
        for row in test["kernels"]:
            seconds, work = row["seconds"], row["work"]
            computed = work["integer"] + work["floats"]
            read = f"{1e-9 * work['n_bytes'] / seconds:.1f}" if work["n_bytes"] else ""
            done = f"{1e-9 * computed / seconds:.0f}" if computed else ""
            share = "" if row["of_limit"] is None else f"{row['of_limit']:.0%}"
            cells = [row["kernel"], f"{1e3 * seconds:.2f}", f"{seconds / whole:.0%}", read, done, share]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines).rstrip()


def speculation_table(result: dict[str, Any]) -> str:
    """Of `speculation.py`, which prints a line of JSON for each temperature."""
    lines = ["| temperature | tokens/s without | with | ratio, all / median / least of a prompt | drafted, right |"]
    lines.append("|---:|---:|---:|---:|---:|")
    for line in result["tables"].splitlines():
        row = json.loads(line)
        ratios = " / ".join(f"{row[key]:.2f}" for key in ("ratio", "median", "least"))
        rates, drafts = f"{row['plain']:.1f} | {row['drafts']:.1f}", f"{row['drafted']}, {row['accepted']}"
        lines.append(f"| {row['temperature']:g} | {rates} | {ratios} | {drafts} |")
    return "\n".join(lines)


def middle(values: Sequence[float]) -> float:
    """The median of an odd number, the upper one of an even."""
    return sorted(values)[len(values) // 2]


def printed(result: dict[str, Any]) -> str:
    """Return the tables that the script printed."""
    return str(result["tables"])


@dataclass(frozen=True)
class Part:
    """A script with what it is given, and about how many minutes it takes with llama.cpp on two cores."""

    name: str
    command: tuple[str, ...]
    minutes: float
    quick: tuple[str, ...] = ()
    """Arguments added for `--quick`."""
    table: Callable[[dict[str, Any]], str] = printed
    """Made of the script's JSON; of what it has printed (`tables`) where `has_rows` is false."""

    @property
    def has_rows(self) -> bool:
        """Return True if the figures are kept one by one instead of as the script prints them."""
        return self.table not in (printed, speculation_table)


_ONCE = ("--peers", "llama.cpp", "--alternations", "1", "--flash-attention", "auto,0")
_DEEP = ("speed.py", "--depths", "8192", "--generate", "64", *_ONCE)
_ONE_LAYER = ("synthetic-1b-1", "synthetic-a3b-1")
_DEEPER = ("speed.py", *_ONE_LAYER, "--depths", "32768", "--prompt", "256", "--generate", "32", *_ONCE)

PARTS = (
    Part("machine", ("machine.py",), 0.2, table=machine.table),
    Part("speed", ("speed.py",), 6.5, ("--quick",), speed_table),
    Part("batches", ("batches.py", "--quick"), 3, table=batches_table),
    Part("latency", ("latency.py",), 3.5, ("--quick",), latency_table),
    Part("rpc", ("rpc.py", "--spec-type", "none"), 4.5, ("--quick",)),
    Part("startup", ("startup.py",), 1.2, ("--repeats", "1"), startup_table),
    Part("serving", ("serving.py",), 4.3, ("--quick",), serving_table),
    Part("roofline", ("roofline.py",), 0.5, table=roofline_table),
    Part("steps", ("steps.py",), 1, ("--quick",), steps_table),
    Part("health", ("health.py",), 3),
    Part("page", ("page.py",), 0.3),
    Part("sessions", ("sessions.py",), 2.2, ("--sessions", "3"), sessions.table),
    Part("experts", ("speed.py", "synthetic-a3b-4", "--alternations", "3"), 2, ("--alternations", "1"), speed_table),
    Part("stream", ("stream.py",), 4.3, ("--alternations", "2"), stream_table),
    Part("depth", _DEEP, 10, ("--generate", "16"), speed_table),
    Part("chats", ("chats.py", "--chats", "16", "--turns", "6", "--alone", "4"), 4, ("--quick",)),
    Part("turns", ("turns.py",), 1.5, ("--turns", "4")),
    Part("speculation", ("speculation.py", "--n", "6"), 1, table=speculation_table),
    Part("embeddings", ("embeddings.py",), 1.2),
    Part("constrained", ("constrained.py",), 3),
    Part("arm", ("arm.py",), 1.5),
    Part("depth-32k", _DEEPER, 8, table=speed_table),
)
"""Parts by importance. The README uses the first seven, which take 23 minutes."""
