"""Python between two steps: from the end of one program to the launch of the next, while N slots generate.

The engine runs in this process, and nothing else: no HTTP, no client. A program is timed from its launch to the end of
the call that has this thread take part; what lies between two programs is the scheduler, sampling, text, and the inputs
of the next step. Calls of callbacks while a program runs count as part of the program.
Medians, and the 90th percentile, of all steps in which every slot generates.

usage: steps.py [MODEL …] [--slots 1,8] [--tokens 200] [--sampling greedy | default] [--threads 2]
                [--rounds 3 | --quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sides import model_path

from llamado.devices.cpu.team import Team
from llamado.engine.engine import Engine
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.engine.request import Done, Event, Failure

_SKIPPED = 8
"""Steps at either end of a round that do not count: prompts are read, answers end."""


class TimedPrograms:
    """A team's programs, with when each was launched and done (ns)."""

    def __init__(self, team: Team) -> None:
        self.times: list[tuple[int, int]] = []
        self._launch, self._join = team._launch, team._join
        team._launch, team._join = self.launch, self.join  # type: ignore[assignment]

    def launch(self, *arguments: int) -> None:
        self._began = time.perf_counter_ns()
        self._launch(*arguments)

    def join(self, *arguments: int) -> None:
        self._join(*arguments)
        self.times.append((self._began, time.perf_counter_ns()))


def generate(llama: LoadedModel, n_slots: int, n_tokens: int, options: dict[str, Any]) -> None:
    """Have all slots generate at once."""
    ended, left = threading.Event(), [n_slots]

    def take(event: Event) -> None:
        if isinstance(event, Failure):
            print(event.error)
        if isinstance(event, (Done, Failure)):
            left[0] -= 1
            if not left[0]:
                ended.set()

    for i in range(n_slots):
        prompt = llama.tokenize(f"A story about {i} mice:", add_special=True)
        llama.engine.submit(llama.defaults.request(prompt, n_predict=n_tokens, seed=i, **options), take)
    ended.wait()


def milliseconds(values: list[int]) -> tuple[float, float]:
    """Median and 90th percentile."""
    return 1e-6 * statistics.median(values), 1e-6 * statistics.quantiles(values, n=10)[-1]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each number of slots and way of sampling."""
    lines = ["| model | slots | sampling | native, ms (median / 90%) | Python, ms | tokens/s |"]
    lines.append("|---|---:|---|---:|---:|---:|")
    for row in rows:
        times = " | ".join(f"{row[key][0]:.3f} / {row[key][1]:.3f}" for key in ("native_ms", "python_ms"))
        lines.append(f"| {row['model']} | {row['slots']} | {row['sampling']} | {times} | {row['rate']:.1f} |")
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", default=["smollm2"], metavar="MODEL")
    parser.add_argument("--slots", default="1,8")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--sampling", choices=("greedy", "default"), action="append")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="1 round")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    flags = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in flags.models:
        for n in (int(part) for part in flags.slots.split(",")):
            settings = EngineOptions(n_ctx=1024 * n, n_slots=n, n_threads=flags.threads)
            with LoadedModel.load(model_path(name), settings) as llama:
                programs = TimedPrograms(llama.forward.devices[0].team)  # type: ignore[attr-defined]
                while isinstance(llama.engine, Engine) and not llama.engine._prepared:  # it uses idle time to get ready
                    time.sleep(0.05)
                for sampling in flags.sampling or ("greedy", "default"):
                    options: dict[str, Any] = {"ignore_eos": True} | (
                        {"temperature": 0.0} if sampling == "greedy" else {}
                    )
                    native: list[int] = []
                    gaps: list[int] = []
                    generate(llama, n, 16, options)
                    for _ in range(1 if flags.quick else flags.rounds):
                        programs.times.clear()
                        generate(llama, n, flags.tokens, options)
                        steps = programs.times[_SKIPPED + n : -_SKIPPED - n]
                        native += [end - began for began, end in steps]
                        gaps += [b[0] - a[1] for a, b in pairwise(steps)]
                    rate = 1e9 * n / (statistics.median(native) + statistics.median(gaps))
                    row: dict[str, Any] = {"model": name, "slots": n, "sampling": sampling, "rate": rate}
                    rows.append({**row, "native_ms": milliseconds(native), "python_ms": milliseconds(gaps)})
    print(table(rows))
    if flags.json:
        flags.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
