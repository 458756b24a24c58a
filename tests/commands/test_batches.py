"""`llamado bench -npl`: speed of concurrent sequences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_measures import CountingForward
from tiny_models import make_llama

from llamado.commands import cli
from llamado.commands.bench.batches import BatchResult, ConcurrentSequences
from llamado.flags import FlagError


def test_batches_of_prompts_and_generation() -> None:
    spans: list[list[tuple[int, int]]] = []

    class Spans(CountingForward):
        def start(self, tokens, spans_, outputs):  # type: ignore[no-untyped-def]
            spans.append([(span.first, span.n) for span in spans_])
            rows = [placed.positions for placed in self.memory.place(spans_)]
            self.calls.append((tokens.tolist(), rows[0].tolist(), outputs.tolist()))
            return _Done()

    class _Done:
        def result(self) -> None: ...

    forward = Spans()  # batches of 7 tokens
    sequences = ConcurrentSequences(forward, 3, 12)
    sequences.read_prompts(10)
    assert spans == [[(0, 7)], [(7, 3), (0, 4)], [(4, 6), (0, 1)], [(1, 7)], [(8, 2)]]
    assert [outputs for *_, outputs in forward.calls] == [[], [], [], [], [1]]
    spans.clear()
    forward.calls.clear()
    sequences.generate(2)
    assert spans == [[(10, 1)] * 3, [(11, 1)] * 3]
    assert [outputs for *_, outputs in forward.calls] == [[0, 1, 2]] * 2
    sequences.free()
    assert forward.memory.allocate(1024) is not None


def test_more_sequences_than_the_batch_size() -> None:
    forward = CountingForward()
    sequences = ConcurrentSequences(forward, 3, 4)
    forward.max_batch = 2
    sizes: list[int] = []
    sequences._evaluate = lambda spans, outputs: sizes.append(len(spans))  # type: ignore[method-assign]
    sequences.generate(2)
    assert sizes == [2, 1, 2, 1]


def test_sequences_that_do_not_fit() -> None:
    forward = CountingForward()
    with pytest.raises(FlagError, match="5 sequences of 250 tokens do not fit a KV cache of 1024"):
        ConcurrentSequences(forward, 5, 250)
    assert forward.memory.allocate(1024) is not None


def test_rates_count_all_sequences() -> None:
    assert BatchResult.of(32, 16, 4, 2.0, 8.0) == BatchResult(32, 16, 4, 192, 2.0, 64.0, 8.0, 8.0, 10.0, 19.2)
    assert BatchResult.of(0, 16, 4, 0.0, 8.0).speed_pp == 0.0


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(make_llama(tmp_path / "m.gguf"))
    given = ["bench", "-m", path, "-npl", "1,3,9", "-p", "5", "-n", "3", "-r", "1", "-t", "1"]
    assert cli.main([*given, "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["pp"], row["tg"], row["pl"], row["n_kv"]) for row in rows] == [
        (5, 3, 1, 8),
        (5, 3, 3, 24),
        (5, 3, 9, 72),
    ]
    for row in rows:
        assert row["speed_tg"] == pytest.approx(3 * row["pl"] / row["t_tg"]) and row["t"] == row["t_pp"] + row["t_tg"]
    assert cli.main(given) == 0
    assert [line.split("|")[5].strip() for line in capsys.readouterr().out.splitlines()] == ["B", "---:", "1", "3", "9"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["-npl", "2,0"], "expected 1 or more sequences, got '2,0'"),
        (["-npl", "2", "-d", "16"], "-d is for one sequence"),
    ],
)
def test_invalid_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], said: str) -> None:
    assert cli.main(["bench", "-m", str(make_llama(tmp_path / "m.gguf")), *given]) == 2
    assert said in capsys.readouterr().err
