"""Graph inputs: contents compared with numpy, including the padding of smaller batches."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from minilm import make_bert
from tiny import TINY, make
from tiny_models import make_gemma3, make_llama

from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import BatchShape, Output, load_model
from llamado.models.batch import Batch, MemoryRows, PrefixRows, RowRange
from llamado.models.inputs import (
    AttentionTemperature,
    Embeddings,
    Input,
    Mask,
    OutputRows,
    Positions,
    RelativeBuckets,
    RowsWritten,
    StateRows,
    TokenIds,
    WindowView,
)
from llamado.models.memory import MemoryOptions
from llamado.models.parts.pooled_indexer import RunMask, RunPositions

Array = np.ndarray[Any, Any]

SPARE = 900
# Two sequences: three tokens of one whose rows begin at 64, two of one whose rows begin at 7.
POSITIONS = np.array([4, 5, 6, 0, 1], np.int32)
FIRST = np.array([64, 64, 64, 7, 7], np.int64)
ROWS = MemoryRows(FIRST + POSITIONS, FIRST, FIRST + POSITIONS, SPARE)
STATES = MemoryRows(np.array([9, 3, 3, 2, 8], np.int64), np.array([9, 9, 3, 2, 2], np.int64), FIRST, 11)
TYPES = {T.I32: np.int32, T.I64: np.int64, T.F32: np.float32, T.F16: np.float16}


def batch(**changes: Any) -> Batch:
    given: dict[str, Any] = {
        "positions": POSITIONS,
        "outputs": np.array([2, 4], np.int32),
        "memory": (ROWS, STATES),
        "tokens": np.array([10, 11, 12, 20, 21], np.int32),
    }
    return Batch(**(given | changes))


def filled(input: Input, given: Batch) -> Array:
    """Return the tensor's contents, slowest dimension first."""
    return input.fill(given).view(TYPES[input.type]).reshape(input.ne[::-1])


def test_token_ids() -> None:
    np.testing.assert_array_equal(filled(TokenIds(8), batch()), [10, 11, 12, 20, 21, 0, 0, 0])


def test_embeddings() -> None:
    rows = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    found = filled(Embeddings(6, 8), batch(tokens=None, embeddings=rows))
    np.testing.assert_array_equal(found, np.concatenate([rows, np.zeros((3, 6), np.float32)]))


def test_positions() -> None:
    text, given = [4, 5, 6, 0, 1, 0, 0, 0], np.arange(20, dtype=np.int32).reshape(4, 5)
    assert filled(Positions(8), batch()).tolist() == text
    assert filled(Positions(8, 4), batch()).reshape(4, 8).tolist() == [text, text, text, [0] * 8]
    found = filled(Positions(8, 4), batch(positions=given)).reshape(4, 8)
    np.testing.assert_array_equal(found, np.pad(given, ((0, 0), (0, 3))))


def test_written_rows() -> None:
    assert filled(RowsWritten("cells", 8), batch()).tolist() == [68, 69, 70, 7, 8, SPARE, SPARE, SPARE]
    assert filled(RowsWritten("cells_1", 6, part=1), batch()).tolist() == [9, 3, 3, 2, 8, 11]


def test_state_rows() -> None:
    assert filled(StateRows("states", 7, part=1), batch()).tolist() == [9, 9, 3, 2, 2, 11, 11]


def expected_mask(sees: Callable[[int, int], bool], n_kv: int) -> Array:
    """Return the mask of five tokens and three of padding; `sees(i, j)`: token i sees row j."""
    return np.array([[0.0 if i < 5 and sees(i, j) else -np.inf for j in range(n_kv)] for i in range(8)], np.float16)


@pytest.mark.parametrize("window", [0, 1, 3, 6, 100])
def test_causal_mask(window: int) -> None:
    found = filled(Mask("mask", 256, 8, view=WindowView(window)), batch())
    reach = window or 256
    right = expected_mask(lambda i, j: FIRST[i] <= j and 0 <= FIRST[i] + POSITIONS[i] - j < reach, 256)
    np.testing.assert_array_equal(found, right)


def test_bidirectional_mask_of_another_part_of_the_memory() -> None:
    last = np.array([70, 70, 70, 8, 8], np.int64)
    found = filled(Mask("mask", 256, 8, part=1), batch(memory=(STATES, MemoryRows(ROWS.written, FIRST, last, SPARE))))
    np.testing.assert_array_equal(found, expected_mask(lambda i, j: FIRST[i] <= j <= last[i], 256))


def test_output_rows() -> None:
    assert filled(OutputRows(4), batch()).tolist() == [2, 4, 0, 0]


def test_batches_without_the_needed_field_are_rejected() -> None:
    with pytest.raises(ValueError, match="takes tokens"):
        TokenIds(8).fill(batch(tokens=None))
    with pytest.raises(ValueError, match="takes embeddings"):
        Embeddings(6, 8).fill(batch())


def test_filled_bytes_are_independent_of_the_batch() -> None:
    """A device may still read the bytes while the batch's arrays are changed for the next batch."""
    inputs: list[Input] = [
        TokenIds(5),
        Positions(5),
        Positions(5, 4),
        RowsWritten("cells", 5),
        StateRows("states", 5),
        OutputRows(2),
        Embeddings(6, 5),
    ]
    for input in inputs:
        given = batch(
            positions=POSITIONS.copy(),
            outputs=np.array([2, 4], np.int32),
            memory=(MemoryRows(ROWS.written.copy(), FIRST.copy(), FIRST, SPARE),),
            tokens=np.arange(5, dtype=np.int32),
            embeddings=np.ones((5, 6), np.float32),
        )
        data = input.fill(given)
        before = data.copy()
        assert given.tokens is not None and given.embeddings is not None
        rows = given.memory[0]
        for array in (given.positions, given.outputs, given.tokens, given.embeddings, rows.written, rows.first):
            array += 1
        np.testing.assert_array_equal(data, before)


def some_rows(random: np.random.Generator, n: int) -> tuple[Array, MemoryRows]:
    """Return random positions and rows of `n` tokens, each of a sequence in contiguous rows."""
    first = random.integers(0, 40, n) * random.integers(0, 3, n)
    positions = random.integers(0, 60, n).astype(np.int32)
    return positions, MemoryRows(first + positions, first, first + positions, SPARE)


@pytest.mark.parametrize(
    "kind", [{}, {"view": WindowView(7)}, {"view": WindowView(8, symmetric=True)}, {"distances": True}], ids=str
)
def test_a_renewed_mask_equals_a_filled_one(kind: dict[str, Any]) -> None:
    """The old contents may be of another number of tokens, another size, or other sequences."""
    random = np.random.default_rng(5)
    memory, held = np.full(2 * 256 * 8, 7, np.uint8), None
    positions, rows = some_rows(random, 4)
    for step in range(120):
        n = random.integers(1, 9) if step % 3 else len(positions)
        if n == len(positions) and step % 7:  # each sequence has one more token
            positions = positions + np.int32(1)
            rows = MemoryRows(rows.written + 1, rows.first, rows.last + 1, SPARE)
        else:
            positions, rows = some_rows(random, n)
        input = Mask("mask", 256 if step % 11 else 128, int(random.integers(n, 9)), **kind)
        given, size = batch(positions=positions, memory=(rows,)), 2 * input.ne[0] * input.ne[1]
        held = input.renew(given, memory[:size], held)
        assert memory[:size].tobytes() == input.fill(given).tobytes()


def test_renewing_a_mask_writes_only_the_changed_cells() -> None:
    """64 sequences with many cells each get one more."""
    first = np.arange(64, dtype=np.int64) * 2048
    memory, held = np.zeros(2 * (1 << 17) * 64, np.uint8), None
    for n in (1000, 1001):
        rows = MemoryRows(first + n, first, first + n, SPARE)
        given = batch(positions=np.full(64, n, np.int32), memory=(rows,))
        held = Mask("mask", 1 << 17, 64).renew(given, memory, held)
        memory[-2:] = 9  # a cell that no token sees in either batch
    assert memory[-2:].tolist() == [9, 9]
    memory[-2:] = Mask("mask", 1 << 17, 64).fill(given)[-2:]
    assert memory.tobytes() == Mask("mask", 1 << 17, 64).fill(given).tobytes()


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("make", [make_llama, make_gemma3, make_bert])
def test_every_graph_input_has_a_feed(tmp_path: Path, make: Callable[..., Path], embeddings: bool) -> None:
    with GGUFFile.open(make(tmp_path / "m.gguf")) as file:
        model = load_model(file)
    shape = BatchShape(8, 2, 256, Output.HIDDEN, embeddings=embeddings)
    graph = model.build(shape, model.memory(MemoryOptions(n_cells=1024)))
    assert [feed.name for feed in graph.feeds] == [*graph.inputs]
    assert ("embeddings" in graph.inputs, "tokens" in graph.inputs) == (embeddings, not embeddings)
    given = batch(embeddings=np.ones((5, model.hparams.n_embd), np.float32))
    for feed in graph.feeds:
        assert feed.fill(given).nbytes == graph.inputs[feed.name].nbytes


def test_chunked_mask() -> None:
    """Positions 4, 5 and 6 in chunks of 5 tokens: the last two are in another chunk than the first."""
    found = filled(Mask("mask_swa", 80, 8, view=WindowView(5, chunked=True)), batch())
    sees = np.zeros((8, 80), bool)
    sees[0, 64:69] = sees[1, 69:70] = sees[2, 69:71] = sees[3, 7:8] = sees[4, 7:9] = True
    np.testing.assert_array_equal(found, np.where(sees, 0, -np.inf))


def test_mask_of_distances() -> None:
    """Each token sees its whole sequence, including later tokens."""
    rows = MemoryRows(ROWS.written, FIRST, np.array([66, 66, 66, 8, 8]) + 4 * (FIRST == 64), SPARE)
    found = filled(Mask("mask", 80, 6, distances=True), batch(memory=(rows,)))
    for i, (own, first, last) in enumerate(zip(rows.written, rows.first, rows.last, strict=True)):
        row = np.full(80, -np.inf)
        row[first : last + 1] = -abs(np.arange(first, last + 1) - own)
        np.testing.assert_array_equal(found[i], row)
    assert np.isneginf(found[5]).all()


def test_attention_temperatures() -> None:
    given = batch(positions=np.array([0, 8190, 8191, 8192, 100000], np.int32))
    found = filled(AttentionTemperature(6, 0.1, 8192, 1.0), given).reshape(-1)
    np.testing.assert_allclose(found, [1, 1, 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(2), 1 + 0.1 * np.log(13), 0], 1e-6)
    plain = filled(AttentionTemperature(5, 0.1, 8192), given).reshape(-1)
    np.testing.assert_allclose(plain[:4], [1, 1, 1, 1 + 0.1 * np.log(2)], 1e-6)


def test_llama4_scales_queries_in_layers_without_rope(tmp_path: Path) -> None:
    """The factors are 1 up to position 8190, beyond the golden rows."""
    with GGUFFile.open(make(TINY["llama4"], tmp_path / "m.gguf")) as file:
        model = load_model(file)
        graph = model.build(BatchShape(4, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    assert [node.name for node in graph.nodes if node.name.startswith("Qcur_temp")] == ["Qcur_temp-3"]
    (temperature,) = (feed for feed in graph.feeds if isinstance(feed, AttentionTemperature))
    found = filled(temperature, batch(positions=np.array([8190, 8191, 16382, 16383], np.int32))).reshape(-1)
    np.testing.assert_allclose(found, 1 + 0.1 * np.log([1, 2, 2, 3]), 1e-6)


def _contiguous_and_split() -> tuple[Batch, Batch, Array]:
    """Return a batch of contiguous sequences, the same with their prefixes elsewhere, and the new row of each row.

    The batch has two tokens of a sequence of 100 at row 128, and three of a sequence of 70 at row 0; the prefixes are
    their first 64 and 32 tokens.
    """
    places = np.array([98, 99, 67, 68, 69], np.int32)
    first = np.array([128, 128, 0, 0, 0], np.int64)
    contiguous = MemoryRows(first + places, first, first + places, SPARE)
    moved = np.arange(256)
    moved[128:160], moved[160:192], moved[192:256] = range(32, 64), range(96, 128), range(320, 384)
    moved[0:32], moved[32:96] = range(32), range(192, 256)
    own = np.array([320, 320, 192, 192, 192], np.int64)
    written = moved[contiguous.written]
    prefixes = (PrefixRows(0, 2, (RowRange(32, 32), RowRange(96, 32))), PrefixRows(2, 5, (RowRange(0, 32),)))
    split = MemoryRows(written, own, written, SPARE, prefixes)
    tokens = np.zeros(5, np.int32)
    return (
        batch(positions=places, memory=(contiguous,), tokens=tokens),
        batch(positions=places, memory=(split,), tokens=tokens),
        moved,
    )


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"view": WindowView(20)},
        {"view": WindowView(50)},
        {"view": WindowView(80)},
        {"view": WindowView(500)},
        {"view": WindowView(33, chunked=True)},
        {"view": WindowView(90, symmetric=True)},
        {"distances": True},
        {"distances": True, "view": WindowView(60)},
    ],
    ids=str,
)
def test_mask_of_sequences_in_several_row_ranges(kind: dict[str, Any]) -> None:
    contiguous, split, moved = _contiguous_and_split()
    right = np.full((8, 512), -np.inf, np.float16)
    plain = filled(Mask("mask", 256, 8, **kind), contiguous)
    for token, row in enumerate(plain):
        (columns,) = np.nonzero(row > -np.inf)
        right[token, moved[columns]] = row[columns]
    np.testing.assert_array_equal(filled(Mask("mask", 512, 8, **kind), split), right)


@pytest.mark.parametrize("n_buckets", [8, 32])
def test_buckets_of_distances(n_buckets: int) -> None:
    """Half of them are for later rows; from a quarter on they grow to distances of 128."""

    def bucket(distance: int) -> int:
        half, later = n_buckets // 2, n_buckets // 2 * (distance > 0)
        n, exact = abs(distance), half // 2
        if n < exact:
            return later + n
        return later + min(exact + int(math.log(n / exact) / math.log(128 / exact) * (half - exact)), half - 1)

    written = np.array([0, 100, 255])
    memory = MemoryRows(written=written, first=written, last=written, spare=0)
    given = batch(tokens=np.zeros(3, np.int32), positions=written, memory=(memory,))
    found = filled(RelativeBuckets(256, 3, n_buckets), given).reshape(3, 256)
    assert found.tolist() == [[bucket(row - own) for row in range(256)] for own in written.tolist()]


def test_buckets_of_sequences_in_several_row_ranges() -> None:
    contiguous, split, moved = _contiguous_and_split()
    plain = filled(RelativeBuckets(256, 8, 32), contiguous).reshape(8, 256)
    found = filled(RelativeBuckets(512, 8, 32), split).reshape(8, 512)
    for token, row in enumerate(filled(Mask("mask", 256, 8), contiguous)[:5]):
        (columns,) = np.nonzero(row > -np.inf)
        np.testing.assert_array_equal(found[token, moved[columns]], plain[token, columns])


def test_runs_of_sequences_in_several_row_ranges() -> None:
    contiguous, split, moved = _contiguous_and_split()
    for own in (False, True):
        plain = filled(RunMask(256, 5, 4, 0, own=own), contiguous)
        right = np.zeros((5, 128), np.float32)
        for token, run in zip(*np.nonzero(plain), strict=True):
            right[token, moved[4 * run] // 4] = 1
        np.testing.assert_array_equal(filled(RunMask(512, 5, 4, 0, own=own), split), right)
    one = [Batch(b.positions[:2], b.outputs[:0], (rows(b, 2),), b.positions[:2], n_seqs=1) for b in (contiguous, split)]
    plain, found = (filled(RunPositions(2, 1, 4, 0), b) for b in one)
    assert plain.tolist() == found.tolist() == [96, 96]


def rows(given: Batch, n: int) -> MemoryRows:
    """Return the rows of the first `n` tokens."""
    all_ = given.memory[0]
    kept = tuple(prefix for prefix in all_.prefixes if prefix.start < n)
    return MemoryRows(all_.written[:n], all_.first[:n], all_.last[:n], SPARE, kept)
