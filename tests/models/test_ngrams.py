"""N-gram embeddings: rows of hashes, the tokens before a batch, and answers in any batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TINY, make

from llamado import Llama
from llamado.commands.bench.perplexity import Score, score_chunk
from llamado.devices.cpu.device import CpuDevice
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model
from llamado.models.batch import Batch
from llamado.models.errors import InvalidModel
from llamado.models.keys import Keys
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


# --- hyper-parameters -------------------------------------------------------------------------------------------------


def keys(**values: Any) -> Keys:
    given: dict[str, Any] = {
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "eos_token_id": 2,
        "layer_multipliers": [5, 7, 9],
        "head_offsets": [0, 97, 194, 291],
        "head_vocab_sizes": [97, 89, 83, 79],
    } | values
    arrays = {key: np.array(value, np.int64) if isinstance(value, list) else value for key, value in given.items()}
    return Keys(Metadata({"general.architecture": "some", **{f"some.ple.{key}": v for key, v in arrays.items()}}))


def test_hashes_are_read() -> None:
    found = Hashes.read(keys(image_token_id=9))
    assert found == Hashes(3, 2, (5, 7, 9), (0, 97, 194, 291), (97, 89, 83, 79), 2, 9) and found.n_rows == 370
    assert Hashes.read(keys()).other == 2  # the end token replaces pictures
    more = keys(layer_multipliers=[5, 7, 9, 1], head_offsets=[0, 97, 194, 291, 1], head_vocab_sizes=[97, 89, 83, 79, 1])
    assert Hashes.read(more) == Hashes.read(keys())
    last = keys(head_offsets=[0, 97, 194, 2**31 - 80], head_vocab_sizes=[97, 89, 2**31 - 195, 79])
    assert Hashes.read(last).n_rows == 2**31 - 1


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"layer_multipliers": [5, -7, 9]}, "has -7; unsigned numbers are expected"),
        ({"layer_multipliers": [5, 7]}, "have 2, 4 and 4 numbers; 3, 4 and 4 are expected"),
        ({"head_offsets": [0, 97, 194]}, "have 3, 3 and 4 numbers"),
        ({"head_vocab_sizes": [97, 89, 83]}, "have 3, 4 and 3 numbers"),
        ({"head_vocab_sizes": [97, 0, 83, 79]}, "has 97 for a part of 0 rows"),
        ({"head_vocab_sizes": [97, -1, 83, 79]}, "has 97 for a part of -1 rows"),
        ({"head_vocab_sizes": [2**31, 89, 83, 79]}, "has 0 for a part of 2147483648 rows"),
        ({"head_offsets": [-1, 97, 194, 291]}, "has -1 for a part of 97 rows"),
        ({"head_offsets": [0, 97, 194, 2**31 - 79]}, "has 2147483569 for a part of 79 rows"),
    ],
)
def test_hashes_outside_the_table_are_rejected(values: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidModel, match=says):
        Hashes.read(keys(**values))


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
