"""Speed-up of drafts: prompts answered with and without them, in turns, in one process, and their bytes compared.

The target is SmolLM2-135M with weights in `--type` f32, which reads as much a token as a model of 1B in four bits.
The drafts come from the same model in a coarser type (`--draft`, by llama-quantize), or from what `--spec-type` names.
Prompts ask for edits of code, prose and JSON.

--equal     all prompts at once over 8 slots, drafts whatever they cost: only bytes are compared.
--taps MS   the target divided among two workers, behind links that deliver every graph so many milliseconds late.

usage: speculation.py [--type f32] [--draft q4_0 | --draft-file FILE] [--spec-type draft-simple,suffix] [--n 16]
                      [--predict 96] [--temperature 0 0.8] [--equal] [--taps MS] [--target FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rpc import workers
from sides import peer_program

from llamado.cluster.taps import Taps
from llamado.devices.split.placement import SplitOptions
from llamado.engine.drafts.cost import Cost
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions, ModelSource
from llamado.engine.request import KindCounts, Result
from llamado.gguf.sources.resolve import resolve

CODE = (
    "def total(items):\n    s = 0\n    for i in range(len(items)):\n        s += items[i].price\n    return s\n",
    "class Stack:\n  def __init__(self):\n    self.data = []\n  def push(self, x):\n    self.data.append(x)\n",
    "def fib(n):\n    if n < 2:\n        return n\n    return fib(n - 1) + fib(n - 2)\n",
    "import os\nfor name in os.listdir('.'):\n    if name.endswith('.txt'):\n        print(name)\n",
    "function add(a, b) {\n  return a + b;\n}\nconsole.log(add(1, 2));\n",
)
EDITS = ("Rename the variables of this code", "Add type hints to this code", "Write a docstring for this code",
         "Turn this code into a loop that is simpler", "Explain what this code does")  # fmt: skip
TOPICS = ("a lighthouse keeper", "the history of glass", "how bread is baked", "a storm in the mountains",
          "why the sky is blue", "a market in the morning", "the life of an ant", "learning to swim",
          "a train that is late", "the first snow")  # fmt: skip
THINGS = ("a person with name, age and city", "a book with title, author and year", "three fruits with colours",
          "a weather report", "a recipe with ingredients", "a list of planets with diameters")  # fmt: skip


def prompts(n: int) -> list[str]:
    """Edits of code, prose and JSON in turns."""
    found = []
    for i in range(n):
        kind, k = i % 3, i // 3
        if kind == 0:
            found.append(f"{EDITS[k % len(EDITS)]}:\n\n{CODE[k // len(EDITS) % len(CODE)]}")
        elif kind == 1:
            lines = ("a short story", "a paragraph", "a letter", "a poem", "a dialogue", "an essay", "a diary entry")
            found.append(f"Write {lines[k // len(TOPICS) % len(lines)]} about {TOPICS[k % len(TOPICS)]}.")
        else:
            found.append(f"Give a JSON object for {THINGS[k % len(THINGS)]}, number {k}. Only JSON.")
    return found


def converted(source: Path, path: Path, type: str) -> None:
    """The same model with weights of another type, by llama-quantize."""
    program = peer_program("llama-quantize")
    done = subprocess.run([program, "--allow-requantize", source, path, type.upper()], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{program}: {done.stdout[-500:]}{done.stderr[-500:]}")


@contextmanager
def divided(path: Path, delay: float) -> Iterator[SplitOptions | None]:
    """Two workers behind taps, with an equal share of the layers each."""
    if delay < 0:
        yield None
        return
    with ExitStack() as running:
        endpoints = running.enter_context(workers("llamado"))
        taps = Taps(endpoints)
        running.callback(taps.close)
        taps.delay(delay)
        yield SplitOptions(rpc=tuple(map(str, taps.endpoints)), tensor_split=(1.0, 1.0))


def answered(llama: LoadedModel, text: str, seed: int, temperature: float, n: int) -> Result:
    chat = llama.template.render([{"role": "user", "content": text}])
    return llama.complete(llama.tokenize(chat, add_special=True), n_predict=n, seed=seed, temperature=temperature)


def of_kinds(after: Sequence[KindCounts], before: Sequence[KindCounts]) -> dict[str, list[int]]:
    """Of each source, tokens that were drafted and that were right meanwhile."""
    pairs = zip(after, before, strict=True)
    return {a.name: [a.n_drafted - b.n_drafted, a.n_accepted - b.n_accepted] for a, b in pairs}


def compared(sides: dict[str, LoadedModel], n: int, n_predict: int, temperature: float) -> dict[str, Any]:
    """Rates of both sides, answer by answer in turns, and how many differ."""
    before = sides["drafts"].engine.snapshot().counters.drafts
    rates: dict[str, list[float]] = {name: [] for name in sides}
    drafted = accepted = different = 0
    seconds = dict.fromkeys(sides, 0.0)
    n_tokens = 0
    for i, text in enumerate(prompts(n)):
        found: dict[str, Result] = {}
        for name in list(sides) if i % 2 else reversed(list(sides)):
            result = found[name] = answered(sides[name], text, i, temperature, n_predict)
            ms = result.timings.predicted_ms
            seconds[name] += ms / 1e3
            if result.n_predicted > 1:
                rates[name].append(1e3 * (result.n_predicted - 1) / ms)
        one, other = found.values()
        different += (one.content, one.tokens, one.stop_type) != (other.content, other.tokens, other.stop_type)
        n_tokens += one.n_predicted - 1
        drafted += found["drafts"].timings.draft_n or 0
        accepted += found["drafts"].timings.draft_n_accepted or 0
    ratios = [a / b for a, b in zip(rates["drafts"], rates["plain"], strict=True)]
    counts = sides["drafts"].engine.snapshot().counters.drafts
    return {
        "temperature": temperature, "prompts": n, "different": different, "tokens": n_tokens,
        "plain": round(n_tokens / seconds["plain"], 2), "drafts": round(n_tokens / seconds["drafts"], 2),
        "ratio": round(seconds["plain"] / seconds["drafts"], 3), "median": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3), "drafted": drafted, "accepted": accepted, "kinds": of_kinds(counts, before),
    }  # fmt: skip


class Always(Cost):
    """Drafts cost nothing."""

    def least_gain(self, n_generating: int, seconds: float = 0.0) -> float:
        """See Cost."""
        return 0.05

    def drafts(self, n_generating: int) -> bool:
        """See Cost."""
        return True


def equal(sides: dict[str, LoadedModel], n: int, n_predict: int, temperature: float) -> dict[str, Any]:
    """Return the number of answers that differ, of prompts that are all sent at once."""
    drafts = sides["drafts"].engine._drafts  # type: ignore[union-attr]
    assert drafts is not None
    drafts.cost, before = Always(), drafts.counts
    answers = {}
    with ThreadPoolExecutor(8) as threads:
        for name, llama in sides.items():
            asked = [
                threads.submit(answered, llama, text, i, temperature, n_predict) for i, text in enumerate(prompts(n))
            ]
            answers[name] = [future.result() for future in asked]
    pairs = list(zip(answers["plain"], answers["drafts"], strict=True))
    counts = drafts.counts
    return {
        "temperature": temperature, "prompts": n, "tokens": sum(a.n_predicted for a, _ in pairs),
        "different": sum((a.content, a.tokens, a.stop_type) != (b.content, b.tokens, b.stop_type) for a, b in pairs),
        "kinds": of_kinds(counts, before),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--type", default="f32")
    parser.add_argument("--draft", default="q4_0")
    parser.add_argument("--draft-file", type=Path)
    parser.add_argument("--spec-type", default="draft-simple")
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--predict", type=int, default=96)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--taps", type=float, default=-1.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--equal", action="store_true")
    flags = parser.parse_args()
    kinds = tuple(flags.spec_type.split(","))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        source = resolve(flags.model)
        target = flags.target or source
        if not flags.target and flags.type:
            target = Path(folder) / "target.gguf"
            converted(source, target, flags.type)
        draft = flags.draft_file
        if draft is None and "draft-simple" in kinds:
            draft = Path(folder) / "draft.gguf"
            converted(source, draft, flags.draft)
        sides = {}
        for name in ("plain", "drafts"):
            model = ModelSource(spec=os.fspath(draft)) if name == "drafts" and draft is not None else None
            options = EngineOptions(
                n_ctx=8192 if flags.equal else 2048,
                n_slots=8 if flags.equal else 1,
                n_threads=flags.threads,
                split=opened.enter_context(divided(target, flags.taps)),
                drafts=DraftOptions(kinds=kinds if name == "drafts" else (), model=model),
            )
            sides[name] = opened.enter_context(LoadedModel.load(target, options))
        for llama in sides.values():
            answered(llama, "Hello!", 0, 0.0, 32)
        for temperature in flags.temperature:
            began = time.perf_counter()
            found = (equal if flags.equal else compared)(sides, flags.n, flags.predict, temperature)
            print(json.dumps(found | {"seconds": round(time.perf_counter() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
