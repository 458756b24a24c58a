"""The parts of `all.py`: which script each one runs, and what table its result becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import batches
import machine
import sessions
import stream
from sides import SIDES

NAMES = {
    "smollm2": "SmolLM2 135M Q4_1",
    "gemma3": "Gemma 3 270M Q4_K_M",
    "synthetic-1b": "synthetic 1B Q4_K_M",
    "synthetic-a3b-4": "synthetic experts Q4_K_M",
}


def of_sides(values: dict[str, float], digits: int = 0) -> str:
    """Ours and theirs."""
    return " / ".join(f"{values[side]:,.{digits}f}" for side in SIDES)


def speed_table(result: dict[str, Any]) -> str:
    """Of `speed.py`."""
    lines = ["| model | test | llamado / llama.cpp, tokens/s | ratio | least … most of ours | reached | peak MB |"]
    lines.append("|---|---|---:|---:|---:|---:|---:|")
    for row in result["rows"]:
        median, own = row["median"], row["tokens_per_second"][SIDES[0]]
        reached = ""
        for key, unit, digits in (("gigabytes_per_token", "GB/s", 1), ("gigaops_per_token", "GOP/s", 0)):
            if row[key] is not None:
                reached = f"{of_sides({side: row[key] * median[side] for side in SIDES}, digits)} {unit}"
        peak = of_sides({side: max(row["peak_memory"][side]) / 1e6 for side in SIDES})
        model, rates = NAMES.get(row["model"], row["model"]), of_sides(median, 1 if median[SIDES[0]] < 100 else 0)
        spread = f"{min(own):,.0f} … {max(own):,.0f}"
        lines.append(f"| {model} | {row['test']} | {rates} | **{row['ratio']:.2f}** | {spread} | {reached} | {peak} |")
    return "\n".join(lines)


def batches_table(result: dict[str, Any]) -> str:
    """Of `batches.py`."""
    return batches.table(result["rows"])


def front_table(speed: dict[str, Any], serving: dict[str, Any]) -> str:
    """The summary of the project's first page."""
    models = [name for name in NAMES if any(row["model"] == name for row in speed["rows"])]
    lines = [f"| llamado / llama.cpp | {' | '.join(NAMES[name] for name in models)} |", f"|---|{'---:|' * len(models)}"]
    for test, what in (("pp512", "prompt, 512 tokens"), ("tg128", "generation, 128 tokens")):
        found = {row["model"]: (row["median"], row["ratio"]) for row in speed["rows"] if row["test"] == test}
        lines.append(_front(what, [found[name] for name in models]))
    most = max((row["clients"] for row in serving["rows"]), default=0)
    at_once = {row["model"]: row for row in serving["rows"] if row["clients"] == most}
    cells = [
        (
            {side: at_once[name][side]["tokens_per_second"] for side in SIDES},
            at_once[name]["ratio"]["tokens_per_second"],
        )
        for name in models
    ]
    lines.append(_front(f"{most} clients over HTTP, tokens/s in all", cells))
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
    """What the script has printed as tables."""
    return str(result["tables"])


@dataclass(frozen=True)
class Part:
    """A script with what it is given, and about how many minutes it takes with llama.cpp on two cores."""

    name: str
    command: tuple[str, ...]
    minutes: float
    quick: tuple[str, ...] = ()
    """What is added for `--quick`."""
    table: Callable[[dict[str, Any]], str] = printed
    """Made of the script's JSON; of what it has printed (`tables`) where `has_rows` is false."""

    @property
    def has_rows(self) -> bool:
        """Whether the figures are kept one by one, and not as the script prints them."""
        return self.table not in (printed, speculation_table)


_ONCE = ("--alternations", "1", "--flash-attention", "auto,0")
_DEEP = ("speed.py", "--depths", "8192", "--generate", "64", *_ONCE)
_ONE_LAYER = ("synthetic-1b-1", "synthetic-a3b-1")
_DEEPER = ("speed.py", *_ONE_LAYER, "--depths", "32768", "--prompt", "256", "--generate", "32", *_ONCE)

PARTS = (
    Part("machine", ("machine.py",), 0.5, table=machine.table),
    Part("speed", ("speed.py",), 4, ("--quick",), speed_table),
    Part("batches", ("batches.py", "--alternations", "2"), 7, ("--quick",), batches_table),
    Part("depth", _DEEP, 9, ("--generate", "16"), speed_table),
    Part("startup", ("startup.py",), 1, ("--repeats", "1"), startup_table),
    Part("serving", ("serving.py",), 5, ("--quick",), serving_table),
    Part("stream", ("stream.py",), 3, ("--alternations", "2"), stream_table),
    Part("roofline", ("roofline.py",), 1, table=roofline_table),
    Part("experts", ("speed.py", "synthetic-a3b-4", "--alternations", "3"), 2, ("--alternations", "1"), speed_table),
    Part("sessions", ("sessions.py",), 2, ("--sessions", "3"), sessions.table),
    Part("chats", ("chats.py", "--chats", "16", "--turns", "6", "--alone", "4"), 3, ("--quick",)),
    Part("turns", ("turns.py",), 2, ("--turns", "4")),
    Part("constrained", ("constrained.py",), 3),
    Part("speculation", ("speculation.py", "--n", "6"), 2, table=speculation_table),
    Part("page", ("page.py",), 0.3),
    Part("arm", ("arm.py",), 0.3),
    Part("embeddings", ("embeddings.py",), 2),
    Part("depth-32k", _DEEPER, 5, table=speed_table),
    Part("rpc", ("rpc.py",), 8),
)
"""In the order of what is wanted most."""
