"""Answers held to 200 JSON schemas: are they valid, what does a mask cost, and how much slower is generating.

In one process, with several slots at work. Group by group of schemas, in turns: constrained answers, then free ones of
exactly as many tokens after the same prompts; in every second group the free ones are timed first. An answer that runs
into the limit of tokens is no failure, and is counted apart; every answer that ends by itself must parse and be an
instance of its schema.

usage: constrained.py [MODEL] [--slots 4] [--schemas 200] [--tokens 256] [--temperature 0.8] [--threads 2] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import jsonschema_rs
import numpy as np
from numpy.typing import NDArray
from schemas import Case, cases
from sides import model_path

from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions
from llamado.engine.request import Done, Event, Failure, GenerationParams, Request, Result
from llamado.engine.sampling.params import Sampling
from llamado.text.grammar.compiler import Constraint, GrammarCompiler, Matcher
from llamado.text.grammar.source import GrammarSource

GROUP = 20


@dataclass
class Costs:
    """Microseconds of each call."""

    compile: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    accept: list[float] = field(default_factory=list)


class TimedConstraint:
    """A constraint whose calls are timed."""

    def __init__(self, constraint: Constraint, costs: Costs) -> None:
        self._constraint = constraint
        self._costs = costs

    def start(self) -> TimedMatcher:
        return TimedMatcher(self._constraint.start(), self._costs)

    def end_reasoning(self) -> bool:
        return self._constraint.end_reasoning()


class TimedMatcher:
    def __init__(self, matcher: Matcher, costs: Costs) -> None:
        self._matcher = matcher
        self._costs = costs

    def mask(self) -> NDArray[np.uint32] | None:
        began = time.perf_counter()
        mask = self._matcher.mask()
        self._costs.mask.append((time.perf_counter() - began) * 1e6)
        return mask

    def accept(self, token: int) -> None:
        began = time.perf_counter()
        self._matcher.accept(token)
        self._costs.accept.append((time.perf_counter() - began) * 1e6)


def run(llama: LoadedModel, requests: list[Request]) -> tuple[list[Result], float]:
    """All requests at once; their results in order, and the seconds until the last one was done."""
    results: list[Result | None] = [None] * len(requests)
    errors: list[Exception] = []
    waiting = threading.Semaphore(0)

    def emit_to(place: int, event: Event) -> None:
        if isinstance(event, Done):
            results[place] = event.result
        elif isinstance(event, Failure):
            errors.append(event.error)
        if isinstance(event, Done | Failure):
            waiting.release()

    began = time.perf_counter()
    for place, request in enumerate(requests):
        llama.engine.submit(request, lambda event, place=place: emit_to(place, event))  # type: ignore[misc]
    for _ in requests:
        waiting.acquire()
    seconds = time.perf_counter() - began
    if errors:
        raise errors[0]
    return [result for result in results if result is not None], seconds


def request(
    llama: LoadedModel, case: Case, seed: int, temperature: float, n: int, constraint: Constraint | None
) -> Request:
    return Request(
        prompt=llama.tokenize(case.prompt, add_special=True, parse_special=False),
        constraint=constraint,
        params=GenerationParams(
            n_predict=n,
            sampling=Sampling(seed=seed, temperature=temperature, ignore_eos=constraint is None),
            cache_prompt=False,
        ),
    )


def quantiles(name: str, values: list[float]) -> str:
    p50, p99 = np.percentile(values, (50, 99))
    return f"| {name}, µs | {np.mean(values):.0f} | {p50:.0f} | {p99:.0f} | {max(values):.0f} |"


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--schemas", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    flags = parser.parse_args()
    costs = Costs()
    ended = valid = tokens = 0
    seconds = {"constrained": 0.0, "free": 0.0}
    ratios: list[float] = []
    faults: list[str] = []
    with LoadedModel.load(
        model_path(flags.model),
        EngineOptions(
            n_ctx=flags.slots * 2048, n_slots=flags.slots, n_threads=flags.threads, drafts=DraftOptions(kinds=())
        ),
    ) as llama:
        compiler = GrammarCompiler(llama.tokenizer)
        began = time.perf_counter()
        _ = compiler.vocabulary.guided  # made on first use
        prepared = time.perf_counter() - began
        chosen = cases()[: flags.schemas]
        run(llama, [request(llama, case, 0, 0.0, 8, None) for case in chosen[: flags.slots]])  # compiles programs
        for first in range(0, len(chosen), GROUP):
            group = chosen[first : first + GROUP]
            limited = []
            for place, case in enumerate(group):
                began = time.perf_counter()
                constraint = compiler.compile(GrammarSource("json_schema", json.dumps(case.schema)))
                costs.compile.append((time.perf_counter() - began) * 1e6)
                timed = TimedConstraint(constraint, costs)
                limited.append(request(llama, case, first + place, flags.temperature, flags.tokens, timed))
            answers, held = run(llama, limited)
            lengths = [answer.n_predicted for answer in answers]
            loose = [
                request(llama, case, first + place, flags.temperature, n, None)
                for place, (case, n) in enumerate(zip(group, lengths, strict=True))
            ]
            _, free = run(llama, loose)
            if first // GROUP % 2 == 0:  # who went first goes again, when everything is warm
                _, held = run(llama, limited)
            tokens += sum(lengths)
            seconds["constrained"] += held
            seconds["free"] += free
            ratios.append(free / held)
            for case, answer in zip(group, answers, strict=True):
                if answer.stop_type == "limit":
                    continue
                ended += 1
                try:
                    jsonschema_rs.Draft202012Validator(case.schema, validate_formats=True).validate(
                        json.loads(answer.content)
                    )
                    valid += 1
                except (ValueError, jsonschema_rs.ValidationError) as error:
                    faults.append(f"{case.name}: {answer.content!r}: {error}")
            done = first + len(group)
            print(f"{done} schemas: {tokens / seconds['constrained']:.1f} tokens/s", file=sys.stderr, flush=True)
    speeds = {side: tokens / spent for side, spent in seconds.items()}
    ratio = speeds["constrained"] / speeds["free"]
    print(f"{len(chosen)} schemas, {flags.model}, {flags.slots} slots, {tokens} tokens")
    print(f"the vocabulary was made ready in {prepared:.2f} s")
    print(f"{ended} answers ended by themselves ({ended / len(chosen):.0%}); {valid} of these are valid")
    print(f"tokens/s, prompts included: constrained {speeds['constrained']:.1f}, free {speeds['free']:.1f}")
    print(f"ratio {ratio:.3f}, median of the groups {np.median(ratios):.3f}")
    print("\n| | mean | median | 99 % | most |\n|---|---:|---:|---:|---:|")
    for name, values in (("compile", costs.compile), ("mask", costs.mask), ("accept", costs.accept)):
        print(quantiles(name, values))
    for fault in faults:
        print("INVALID", fault)
    if flags.json:
        figures = {"ended": ended, "valid": valid, "tokens": tokens, "tokens_per_second": speeds, "faults": faults}
        flags.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
