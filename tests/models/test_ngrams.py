"""N-gram embeddings: rows of hashes, the tokens before a batch, and answers in any batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny import TINY, make

from llamado import Llama
from llamado.commands.bench.perplexity import Score, score_chunk
from llamado.devices.cpu.device import CpuDevice
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model
from llamado.models.batch import Batch
from llamado.models.memory import Handle, Span, windows_before
from llamado.models.memory.run import Run
from llamado.models.parts.ngrams import Hashes, NgramRows

HASHES = Hashes(3, 2, ((1 << 44) + 7, (1 << 63) + 99, 12345678901), (0, 97, 194, 291), (97, 89, 83, 79), 2, 9)


def rows(tokens: list[int], before: list[list[int]] | None, n: int = 0) -> list[list[int]]:
    there = np.array(tokens, np.int32)
    behind = None if before is None else np.array(before, np.int32)
    batch = Batch(np.arange(len(tokens)), np.array([0]), (), there, before=behind)
    found = NgramRows(HASHES, n or len(tokens)).fill(batch).view(np.int32).reshape(-1, 4)
    return [list(map(int, row)) for row in found]


def expected(token: int, one: int, two: int) -> list[int]:
    a, b, c = HASHES.multipliers
    pair = (token * a % 2**64) ^ (one * b % 2**64)
    three = pair ^ (two * c % 2**64)
    whole = zip((pair, pair, three, three), HASHES.sizes, HASHES.offsets, strict=True)
    return [mixed % size + offset for mixed, size, offset in whole]


def test_rows_are_hashes_of_a_token_and_those_before_it() -> None:
    assert rows([300, 7], [[5, 6], [6, 300]]) == [expected(300, 6, 5), expected(7, 300, 6)]


def test_an_end_token_replaces_all_tokens_before_it() -> None:
    assert rows([8], [[5, 2]]) == [expected(8, 2, 2)]
    assert rows([8], [[2, 5]]) == [expected(8, 5, 2)]
    assert rows([8], [[-1, 5]]) == [expected(8, 5, 2)]
    assert rows([8], None) == rows([8], [[-1, -1]]) == [expected(8, 2, 2)]
    assert rows([2], [[4, 5]]) == [expected(2, 5, 4)]  # an end token does not hide those before itself


def test_padding_is_row_zero() -> None:
    assert rows([8], [[4, 5]], 3)[1:] == [[0] * 4] * 2


def test_windows_of_preceding_tokens() -> None:
    handle = Handle(Run(0, 256), [])
    spans = [Span(handle, 0, 2), Span(handle, 1, 1, before=[4]), Span(handle, 9, 3, before=[1, 2, 3])]
    found = windows_before(np.array([10, 11, 20, 30, 31, 32], np.int32), spans, 2)
    assert found.tolist() == [[-1, -1], [-1, 10], [-1, 4], [2, 3], [3, 30], [30, 31]]
    with pytest.raises(ValueError, match="2 tokens before position 9"):
        windows_before(np.array([1], np.int32), [Span(handle, 9, 1, before=[3])], 2)


@pytest.mark.slow
def test_scores_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    path, tokens, found = (
        make(TINY["qwen4exp"], tmp_path / "m.gguf"),
        np.random.default_rng(3).integers(3, 300, 150),
        [],
    )
    for max_batch in (160, 16):
        with GGUFFile.open(path) as file:
            runner = ModelRunner(
                file, load_model(file), [CpuDevice(1)], RunnerOptions(n_cells=256, max_batch=max_batch)
            )
            score = Score()
            score_chunk(runner, tokens.tolist(), score)
            found.append((score.count, score.nll))
            runner.close()
    assert found[0] == found[1]


@pytest.mark.full
def test_answers_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    path = make(TINY["qwen4exp"], tmp_path / "m.gguf")
    prompt = "Once upon a time there was a little house. " * 4
    answers = []
    for options in ({}, {"n_batch": 8, "n_ubatch": 8}):
        with Llama(model_path=str(path), n_ctx=512, verbose=False, **options) as llm:
            first = llm(prompt, max_tokens=12, temperature=0.0)["choices"][0]["text"]
            answers.append(
                (first, llm(prompt + first + " And then", max_tokens=12, temperature=0.0)["choices"][0]["text"])
            )
    assert answers[0] == answers[1] and answers[0][0]
