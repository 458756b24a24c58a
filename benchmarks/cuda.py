"""Speed on an NVIDIA card: llamado and llama.cpp's CUDA back end in turns on one card, each time in a new process.

Models have random weights and true shapes: 1B and 8B in Q4_K_M, 8B in Q8_0, and a mixture of experts
(half the layers of Qwen3-30B-A3B).
Tests are prompts of 512 tokens and generation, both also behind 8,192 tokens, and batches of 1, 8 and 32 sequences.

usage: cuda.py --build FOLDER
       cuda.py [--bench PATH] [--models 1b,8b,8b-q8_0,a3b] [--device CUDA0] [--alternations 3]
               [--seconds 240] [--folder FOLDER] [--vocabulary-from MODEL] [--fake] [--json FILE]
--bench: llama.cpp's llama-bench, built with -DGGML_CUDA=ON; llama-batched-bench is expected beside it.
--build: compile them in FOLDER, which has llama.cpp's sources, with cmake and nvcc; 3.5 minutes with 16 cores.
Without llama-bench only our side is measured. Once --seconds have passed, no further test begins.
--fake: a card that numpy emulates, a tiny model and few tokens: tries out the script where there is no card.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from sides import SIDES, our_command, run
from synthetic import SHAPES, write_model

from llamado.gguf.sources.resolve import resolve

TESTS = Path(__file__).parents[1] / "tests" / "devices" / "cuda"
RESULT = Path(__file__).parent / "results" / "cuda.json"
MODELS = {
    "1b": ("1b", "q4_k_m"),
    "8b": ("8b", "q4_k_m"),
    "8b-q8_0": ("8b", "q8_0"),
    "a3b": ("a3b-24", "q4_k_m"),
    "tiny": ("tiny", "q4_k_m"),
}
"""Shapes and mixes of weight types by name."""
USUAL = ("1b", "8b", "8b-q8_0", "a3b")
_TIMEOUT = 300.0


class Sizes(NamedTuple):
    """Tokens of the tests."""

    prompt: int = 512
    generate: int = 128
    depth: int = 8192
    parallel: tuple[int, ...] = (1, 8, 32)
    batch_prompt: int = 32
    batch_generate: int = 64


FAKE = Sizes(prompt=5, generate=2, depth=8, parallel=(1, 2), batch_prompt=2, batch_generate=2)

Rates = dict[str, float]
"""Tokens per second by test."""
Measure = Callable[[Path, Sizes], Rates]


def rates_of_ours(command: Sequence[str], path: Path, sizes: Sizes) -> Rates:
    """Measure one side once. `command`: `llamado bench`."""
    one = [*command, "-m", str(path), "-r", "1", "-o", "json"]
    options = ["-p", str(sizes.prompt), "-n", str(sizes.generate), "-d", f"0,{sizes.depth}"]
    found = {}
    for row in json.loads(run([*one, *options], timeout=_TIMEOUT)):
        if row["device"] not in command:
            sys.exit(f"{path} ran on {row['device']}, not on the card")
        found[row["test"]] = row["tokens_per_second"]
    options = ["-npl", _listed(sizes.parallel), "-p", str(sizes.batch_prompt), "-n", str(sizes.batch_generate)]
    rows = json.loads(run([*one, *options], timeout=_TIMEOUT))
    return found | {_sequences(row): row["speed_tg"] for row in rows}


def rates_of_theirs(bench: Sequence[str], batched: Sequence[str] | None, path: Path, sizes: Sizes) -> Rates:
    """Measure the other side once. `bench`: llama-bench; `batched`: llama-batched-bench."""
    options = ["-p", str(sizes.prompt), "-n", str(sizes.generate), "-d", f"0,{sizes.depth}", "-r", "1", "-o", "json"]
    found: Rates = {}
    for row in json.loads(run([*bench, "-m", str(path), *options], timeout=_TIMEOUT)):
        test = f"pp{row['n_prompt']}" if row["n_prompt"] else f"tg{row['n_gen']}"
        found[f"{test} @ d{row['n_depth']}" if row["n_depth"] else test] = row["avg_ts"]
    if batched is None:
        return found
    room = max(sizes.parallel) * (sizes.batch_prompt + sizes.batch_generate)
    options = ["-npl", _listed(sizes.parallel), "-npp", str(sizes.batch_prompt), "-ntg", str(sizes.batch_generate)]
    printed = run([*batched, "-m", str(path), *options, "-c", str(room), "--output-format", "jsonl"], timeout=_TIMEOUT)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return found | {_sequences(row): row["speed_tg"] for row in rows}


def _sequences(row: dict[str, Any]) -> str:
    return f"{row['pl']} sequence{'s' if row['pl'] > 1 else ''}"


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


@dataclass
class Row:
    """One test on one model: tokens per second of each run, by side."""

    model: str
    test: str
    tokens_per_second: dict[str, list[float]] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        medians = {side: median(rates) for side, rates in self.tokens_per_second.items()}
        ratio = medians[SIDES[0]] / medians[SIDES[1]] if len(medians) == 2 else None
        return {
            "model": self.model, "test": self.test, "tokens_per_second": self.tokens_per_second, "median": medians,
            "ratio": ratio,
        }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each test."""
    lines = [
        f"| model | test | {' | '.join(f'{side}, tokens/s' for side in SIDES)} | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        cells = [f"{row['median'][side]:,.1f}" if side in row["median"] else "" for side in SIDES]
        ratio = "" if row["ratio"] is None else f"**{row['ratio']:.2f}**"
        lines.append(f"| {row['model']} | {row['test']} | {' | '.join(cells)} | {ratio} |")
    return "\n".join(lines)


def measure(
    models: dict[str, Path], sides: dict[str, Measure], sizes: Sizes, turns: int, late: Callable[[], bool]
) -> list[Row]:
    """Run the sides in turns, each model once before any is measured again, until it is late."""
    rows: dict[tuple[str, str], Row] = {}
    for turn in range(turns):
        for model, path in models.items():
            for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
                if late():
                    print(f"LEFT OUT: {side} on {model}, turn {turn + 1}: time is up", file=sys.stderr, flush=True)
                    continue
                began = time.monotonic()
                found = sides[side](path, sizes)
                for test, rate in found.items():
                    row = rows.setdefault((model, test), Row(model, test))
                    row.tokens_per_second.setdefault(side, []).append(rate)
                shown = ", ".join(f"{test} {rate:.1f}" for test, rate in found.items())
                took = time.monotonic() - began
                print(f"{model} {side} {turn + 1} ({took:.0f} s): {shown}", file=sys.stderr, flush=True)
    return list(rows.values())


def make_models(names: Sequence[str], folder: Path, vocabulary_from: str) -> dict[str, Path]:
    """Write the models that are not there yet."""
    made = {}
    for name in names:
        shape, mix = MODELS[name]
        made[name] = path = folder / f"{shape}-{mix}.gguf"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            write_model(unfinished, SHAPES[shape], mix, resolve(vocabulary_from))
            unfinished.replace(path)
    return made


def build(source: Path) -> None:
    """Compile llama.cpp's benchmarks with CUDA into `build-cuda`. Ends the script if that fails."""
    folder = source / "build-cuda"
    options = ["-DGGML_CUDA=ON", "-DCMAKE_CUDA_ARCHITECTURES=native", "-DCMAKE_BUILD_TYPE=Release", "-DLLAMA_CURL=OFF"]
    targets = ["--target", "llama-bench", "llama-batched-bench", "-j", str(os.cpu_count() or 1)]
    run(["cmake", "-S", str(source), "-B", str(folder), *options])
    run(["cmake", "--build", str(folder), *targets])


def sides_of(flags: argparse.Namespace) -> dict[str, Measure]:
    """Our side, and llama.cpp's if its programs are there."""
    device = ["bench", "--device", flags.device, "-ngl", "99", "--fit-target", "0"]
    if flags.fake:
        here = [sys.executable, str(TESTS / "fake_machine.py"), *device]
        bench = [sys.executable, str(TESTS / "fake_llama_bench.py")]
        return {SIDES[0]: partial(rates_of_ours, here), SIDES[1]: partial(rates_of_theirs, bench, [*bench, "batched"])}
    found: dict[str, Measure] = {SIDES[0]: partial(rates_of_ours, our_command(*device))}
    path: Path | None = flags.bench
    if path is not None:
        if not path.exists():
            sys.exit(f"{path} is missing")
        batched = path.with_name("llama-batched-bench")
        layers = ["-ngl", "99", "-fa", "1"]
        commands = [str(path), *layers], [str(batched), *layers] if batched.exists() else None
        found[SIDES[1]] = partial(rates_of_theirs, *commands)
    return found


def card(device: str) -> dict[str, Any]:
    """The card's name, memory and driver."""
    from llamado.devices.cuda.driver import Driver

    driver = Driver()
    found = driver.properties(int(device.removeprefix("CUDA")))
    return {"name": found.name, "bytes": found.total_bytes, "capability": found.capability, "driver": driver.version}


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="compile llama.cpp there, and end")
    parser.add_argument("--bench", type=Path, metavar="PATH", help="llama.cpp's llama-bench, built with CUDA")
    parser.add_argument("--models", default=None, metavar="M,M", help=f"default: {','.join(USUAL)}")
    parser.add_argument("--device", default="CUDA0")
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240.0, help="time after which no further test begins")
    parser.add_argument("--folder", type=Path, help="where the models are, or are written")
    parser.add_argument("--vocabulary-from", default="smollm2", metavar="MODEL")
    parser.add_argument("--fake", action="store_true", help="an emulated card, tiny models")
    parser.add_argument("--json", type=Path, default=None, help=f"default: {RESULT}; with --fake nowhere")
    flags = parser.parse_args()
    if flags.build is not None:
        build(flags.build)
        return
    began = time.monotonic()
    names = (flags.models or ("tiny" if flags.fake else ",".join(USUAL))).split(",")
    if unknown := set(names) - set(MODELS):
        sys.exit(f"--models: {min(unknown)}: unknown; there are {', '.join(MODELS)}")
    with tempfile.TemporaryDirectory() as temporary:
        models = make_models(names, flags.folder or Path(temporary), flags.vocabulary_from)
        sides = sides_of(flags)
        turns = 1 if flags.fake else flags.alternations
        late = lambda: time.monotonic() - began > flags.seconds  # noqa: E731
        rows = [row.summary() for row in measure(models, sides, FAKE if flags.fake else Sizes(), turns, late)]
    print(table(rows))
    out = flags.json or (None if flags.fake else RESULT)
    if out is not None:
        result = {"card": None if flags.fake else card(flags.device), "rows": rows}
        out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
