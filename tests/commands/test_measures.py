"""Perplexity and speed, with a stand-in for the forward pass."""

from __future__ import annotations

import math
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import hold_experts, make_llama

from llamado.commands.bench import speed
from llamado.commands.bench.perplexity import Score, score_text
from llamado.commands.bench.speed import BenchSequence, measure, weights_per_token, whole_numbers
from llamado.flags import FlagError
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model
from llamado.models.memory import KeysValues, Memory, MemoryOptions, Span

N_VOCAB = 11


class CountingForward:
    """After token t, the logit of t + 1 (mod n_vocab) is log(3), all others are 0. Records its calls."""

    n_vocab = N_VOCAB
    max_batch = chunk = 7

    def __init__(self) -> None:
        self.memory = Memory([KeysValues(32, 32)], MemoryOptions(n_cells=1024))
        self.calls: list[tuple[list[int], list[int], list[int]]] = []

    def start(
        self,
        tokens: NDArray[np.int32],
        spans: list[Span],
        outputs: NDArray[np.int32],
    ) -> Future[NDArray[np.float32]]:
        (placed,) = self.memory.place(spans)
        positions = placed.positions
        assert len(tokens) == len(positions) <= self.max_batch and not placed.rows[0].first.any()
        self.calls.append((tokens.tolist(), positions.tolist(), outputs.tolist()))
        logits = np.zeros((len(outputs), N_VOCAB), np.float32)
        for row, i in zip(logits, outputs.tolist(), strict=True):
            row[(tokens[i] + 1) % N_VOCAB] = math.log(3)
        future: Future[NDArray[np.float32]] = Future()
        future.set_result(logits)
        return future


def test_perplexity_of_a_known_distribution() -> None:
    # Every second token is the predicted one (probability 3/13), the others are not (1/13).
    forward = CountingForward()
    tokens = [0, 1, 0, 1, 0, 1, 0, 1, 0, 1] * 4
    score = score_text(forward, tokens, 10, bos=None)
    # The second half of each chunk without its last token: positions 5 to 8.
    assert score.count == 4 * 4
    expected = math.exp(-(math.log(3 / 13) + math.log(1 / 13)) / 2)
    assert score.perplexity == pytest.approx(expected)
    spread = math.log(3) / 2  # standard deviation of the negative log-likelihood
    assert score.error == pytest.approx(expected * spread / math.sqrt(15))


def test_chunks_start_with_bos_and_respect_the_batch_size() -> None:
    forward = CountingForward()
    score_text(forward, [2] * 25, 10, bos=5, chunks=1)
    assert [tokens for tokens, _, _ in forward.calls] == [[5] + [2] * 6, [2] * 3]
    assert [positions for _, positions, _ in forward.calls] == [list(range(7)), [7, 8, 9]]
    assert [outputs for _, _, outputs in forward.calls] == [[5, 6], [0, 1]]


def test_text_is_too_short() -> None:
    with pytest.raises(FlagError, match="needs at least 20"):
        score_text(CountingForward(), [1] * 19, 10, bos=None)


def test_certain_predictions_have_no_error() -> None:
    assert Score(4, 4.0, 4.0).error == 0.0


def test_prompts_are_fed_in_batches_with_one_row_of_logits() -> None:
    forward = CountingForward()
    BenchSequence(forward, 10).feed(np.arange(10, dtype=np.int32), 4)
    assert [(positions, outputs) for _, positions, outputs in forward.calls] == [
        ([0, 1, 2, 3], []),
        ([4, 5, 6, 7], []),
        ([8, 9], [1]),
    ]


def test_generation_is_fed_one_by_one() -> None:
    forward = CountingForward()
    BenchSequence(forward, 2).feed_one_by_one(np.array([3, 4], np.int32))
    assert forward.calls == [([3], [0], [0]), ([4], [1], [0])]


def test_reset_to_a_depth() -> None:
    forward = CountingForward()
    sequence = BenchSequence(forward, 12)
    for _ in range(2):  # the second time it rewinds
        sequence.reset(9)
        sequence.feed(np.array([1, 2], np.int32), 4)
    placed = [positions for _, positions, _ in forward.calls]
    assert placed == [list(range(7)), [7, 8], [9, 10], [9, 10]]
    sequence.free()
    assert forward.memory.allocate(1024) is not None


def test_reset_without_rewind(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CountingForward()
    sequence, rewind = BenchSequence(forward, 8), forward.memory.rewind
    monkeypatch.setattr(forward.memory, "rewind", lambda handle, n: (n == 0 or not handle.used) and rewind(handle, n))
    for _ in range(2):
        sequence.reset(3)
        sequence.feed(np.array([1], np.int32), 4)
    assert [positions for _, positions, _ in forward.calls] == [[0, 1, 2], [3]] * 2


def test_measure_warms_up_once() -> None:
    calls: list[int] = []
    mean, deviation = measure(lambda: calls.append(1), 100, 3, lambda: calls.append(0))
    assert calls == [0, 1] * 4 and mean > 0 and deviation >= 0
    assert measure(lambda: None, 1, 1, lambda: None)[1] == 0.0


def test_mean_and_deviation_of_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """2, 4 and 5 seconds for 100 tokens; the warm-up does not count."""
    times = iter([0.0, 2.0, 10.0, 14.0, 20.0, 25.0])
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    mean, deviation = measure(lambda: None, 100, 3, lambda: None)
    assert mean == pytest.approx((50 + 25 + 20) / 3)
    assert deviation == pytest.approx(math.sqrt(((50 - mean) ** 2 + (25 - mean) ** 2 + (20 - mean) ** 2) / 2))


def test_whole_numbers() -> None:
    assert whole_numbers("512,0, 64", "-p") == [512, 0, 64]
    for bad in ("x", "1,-2", "1.5"):
        with pytest.raises(FlagError, match="-p"):
            whole_numbers(bad, "-p")


@pytest.mark.parametrize("tied", [False, True])
def test_weights_per_token(tmp_path: Path, tied: bool) -> None:
    with GGUFFile.open(make_llama(tmp_path / "m.gguf", n_layer=2, n_vocab=320, tied=tied)) as file:
        model = load_model(file)
        table = file.tensors["token_embd.weight"].nbytes
        row = table // 320
        matrices = sum(t.n_elements for name, t in file.tensors.items() if "blk." in name and t.ne[1] > 1)
        # One row of the embedding; all of it in addition if the head shares the matrix.
        whole = file.nbytes + row - (0 if tied else table)
        assert weights_per_token(file, model) == (whole, matrices)
        hold_experts(model, "ffn_up", 4, 1)
        up = file.tensors["blk.0.ffn_up.weight"]
        unread, uncomputed = 2 * up.nbytes * 3 // 4, 2 * up.n_elements * 3 // 4
        assert weights_per_token(file, model) == (whole - unread, matrices - uncomputed)
