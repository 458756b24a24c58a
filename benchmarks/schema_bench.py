"""JSONSchemaBench (MaskBench): how many schemas compile, and how many of these judge all their instances correctly.

A schema passes if every valid instance is accepted and every invalid one rejected, walked byte by byte with the end of
the answer allowed at its end. The data is not part of the project: 11,306 schemas with instances, one JSON object a
line (`name`, `schema`, `tests` with `valid` and `data`), from github.com/guidance-ai/jsonschemabench.

usage: schema_bench.py FILE.jsonl[.xz] [--every 1] [--offset 0] [--json FILE] [--faults FILE]
"""

from __future__ import annotations

import argparse
import collections
import json
import lzma
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from llamado.gguf.metadata import Metadata, StringArray
from llamado.text.grammar.compiler import GrammarCompiler, Matcher
from llamado.text.grammar.source import ConstraintError, GrammarError, GrammarSource
from llamado.text.tokenizer.bpe import SPELLING
from llamado.text.tokenizer.tokenizer import Tokenizer, load_tokenizer


def bytes_tokenizer() -> Tokenizer:
    """A vocabulary of the 256 bytes and the end of an answer."""
    values: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": StringArray.of([*SPELLING, "<|end|>"]),
        "tokenizer.ggml.token_type": np.array([1] * 256 + [3], np.int32),
        "tokenizer.ggml.merges": StringArray.of([]),
        "tokenizer.ggml.eos_token_id": 256,
    }
    return load_tokenizer(Metadata(values))


class Judge:
    """Walks instances through matchers."""

    def __init__(self) -> None:
        tokenizer = bytes_tokenizer()
        self.compiler = GrammarCompiler(tokenizer)
        _ = self.compiler.vocabulary.guided
        self._ids = {tokenizer.piece(token): token for token in range(256)}
        self._end = 256
        self.mask_us: list[float] = []

    def accepts(self, matcher: Matcher, data: object) -> bool:
        """Return True if an instance may be the whole answer. Raises ConstraintError at a limit of the parser."""
        for byte in json.dumps(data, ensure_ascii=False).encode("utf-8", "surrogatepass"):
            token = self._ids[bytes([byte])]
            if not self._allows(matcher, token):
                return False
            matcher.accept(token)
        return self._allows(matcher, self._end)

    def _allows(self, matcher: Matcher, token: int) -> bool:
        began = time.perf_counter()
        mask = matcher.mask()
        self.mask_us.append((time.perf_counter() - began) * 1e6)
        return mask is None or bool(mask[token >> 5] >> (token & 31) & 1)


def cases(path: Path, every: int, offset: int) -> Iterator[dict[str, Any]]:
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
        for number, line in enumerate(lines):
            if number % every == offset:
                yield json.loads(line)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--every", type=int, default=1, help="take one schema in so many")
    parser.add_argument("--offset", type=int, default=0, help="the first schema taken")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--faults", type=Path, help="write a line per refused schema and misjudged instance")
    flags = parser.parse_args()
    judge = Judge()
    count: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    compile_ms: list[float] = []
    for case in cases(flags.data, flags.every, flags.offset):
        count["schemas"] += 1
        if count["schemas"] % 1000 == 0:
            print(dict(count), file=sys.stderr, flush=True)
        began = time.perf_counter()
        try:
            constraint = judge.compiler.compile(GrammarSource("json_schema", json.dumps(case["schema"])))
        except GrammarError as error:
            faults.append(f"{case['name']}\trefused\t{str(error).partition('JSON schema error at ')[2] or error}")
            continue
        finally:
            compile_ms.append((time.perf_counter() - began) * 1e3)
        count["accepted"] += 1
        passing = True
        for number, test in enumerate(case["tests"]):
            kind = "valid" if test["valid"] else "invalid"
            count[kind] += 1
            try:
                right = judge.accepts(constraint.start(), test["data"]) == test["valid"]
                fault = "wrongly " + ("rejected" if test["valid"] else "accepted")
            except ConstraintError as error:
                right, fault = False, f"broken off ({error})"
                count["broken off"] += 1
            if not right:
                passing = False
                count[f"{kind} misjudged"] += 1
                faults.append(f"{case['name']}\t{fault}\ttest {number}")
        count["passing"] += passing
    for name in ("schemas", "accepted", "passing", "valid", "valid misjudged", "invalid", "invalid misjudged"):
        print(f"{name}: {count[name]}")
    print(f"answers broken off: {count['broken off']}")
    print(f"compile, ms: mean {np.mean(compile_ms):.1f}, 99 % {np.percentile(compile_ms, 99):.1f}")
    print(f"mask, µs: mean {np.mean(judge.mask_us):.1f}, 99 % {np.percentile(judge.mask_us, 99):.1f}")
    if flags.json:
        flags.json.write_text(json.dumps(count, indent=2) + "\n")
    if flags.faults:
        flags.faults.write_text("".join(f"{fault}\n" for fault in faults))


if __name__ == "__main__":
    main()
