"""Sequence memory: after any operations, each token of a batch sees the rows of the tokens before it and no others."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import first_of

from llamado.ggml.tensor import Tensor
from llamado.gguf.types import TensorType
from llamado.models.errors import UnsupportedModel
from llamado.models.memory import (
    Handle,
    KeysValues,
    Latent,
    LayerCache,
    LayerMemory,
    Memory,
    MemoryOptions,
    RecurrentState,
    RowSpan,
    SharedMemory,
    Span,
    check_types,
)
from llamado.models.memory.parts import BLOCK, SNAPSHOTS
from llamado.models.memory.states import States

Array = np.ndarray[Any, Any]
WINDOW, MAX_BATCH, N_SEQUENCES = 37, 50, 3
KINDS: dict[str, tuple[LayerMemory, ...]] = {
    "all": (KeysValues(1, 1), Latent(2)),
    "windows": (KeysValues(1, 1, WINDOW), KeysValues(1, 1), KeysValues(1, 1, 9)),
    "states": (RecurrentState((1, 2)),),
    "hybrid": (RecurrentState((2,)), KeysValues(1, 1, WINDOW), Latent(2)),
}


def batch_size(n: int) -> int:
    """Return the largest allowed batch of one sequence of up to n tokens."""
    return n if n <= 4 else n // 4 * 4


class RecordingMemory:
    """A memory whose rows hold the hash of all tokens up to a position, and the tokens of its sequences."""

    def __init__(self, layers: Sequence[LayerMemory]) -> None:
        f32 = TensorType.F32
        self.memory = Memory(
            layers,
            MemoryOptions(n_cells=4096, n_sequences=N_SEQUENCES, max_batch=MAX_BATCH, type_k=f32, type_v=f32, slack=20),
        )
        self.memory.attach(self)
        self.rows = {t.name: np.full((t.ne[1], t.ne[0]), -1.0, np.float32) for t in self.memory.tensors}
        if self.memory.has_states:  # the last row of states is zero
            for layer in (i for i, memory in enumerate(layers) if isinstance(memory, RecurrentState)):
                for tensor in self.memory[layer].tensors:
                    self.rows[tensor.name][-1] = 0.0
        self.texts: dict[Handle, list[int]] = {}

    def copy_rows(self, tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        for tensor in tensors:
            assert n > 0 and min(src, dst) >= 0 and max(src, dst) + n <= self.memory.rows_of[tensor.name]
            self.rows[tensor.name][dst : dst + n] = self.rows[tensor.name][src : src + n].copy()

    def read_rows(self, spans: Sequence[RowSpan]) -> Array:
        return np.concatenate([self.rows[t.name][a : a + n].reshape(-1).view(np.uint8) for t, a, n in spans])

    def write_rows(self, spans: Sequence[RowSpan], pieces: Sequence[Array]) -> None:
        for (tensor, start, n), data in zip(spans, pieces, strict=True):
            self.rows[tensor.name][start : start + n] = data.copy().view(np.float32).reshape(n, -1)

    def numbers(self, tokens: Sequence[int]) -> Array:
        """Return the hash of each prefix: exact in float32, and never 0."""
        found, number = [], 1
        for token in tokens:
            number = (number * 31 + token + 1) % 65521
            found.append(number + 1)
        return np.array(found, np.float32)

    def evaluate(self, parts: list[tuple[Handle, list[int]]]) -> None:
        """Run a batch that extends sequences, and check every row that its tokens see."""
        spans = [Span(handle, handle.used, len(tokens)) for handle, tokens in parts]
        owners = [(span.handle, span.first + i) for span in spans for i in range(span.n)]
        numbers = {handle: self.numbers(self.texts[handle][: handle.used] + tokens) for handle, tokens in parts}
        whole, found = np.arange(len(owners)), []
        for placed in self.memory.place(spans, batch_size):
            own = whole if placed.tokens is None else placed.tokens
            found += own.tolist()
            assert (placed.tokens is None) == (not self.memory.has_states) == (not placed.n_seqs)
            length = len(own) // max(placed.n_seqs, 1)
            assert not placed.n_seqs or (len(own) == placed.n_seqs * length == placed.n_seqs * batch_size(length))
            for i, token in enumerate(own):
                handle, position = owners[token]
                assert placed.positions[i] == position
                for layer in range(len(self.memory)):
                    kept = self.memory[layer]
                    rows = placed.rows[kept.number]
                    if isinstance(kept.part, States):
                        number, later = divmod(i, length)
                        self.check_state(kept, rows, number, position, numbers[handle], first=not later)
                    else:
                        self.check_rows(kept, rows, i, position, numbers[handle])
        assert sorted(found) == whole.tolist(), "each token once"
        for handle, tokens in parts:
            self.texts[handle] = self.texts[handle][: handle.used] + tokens
            handle.used += len(tokens)

    def check_state(
        self, kept: LayerCache, rows: Any, number: int, position: int, numbers: Array, *, first: bool
    ) -> None:
        """Check that the state is that of the token before; a batch only keeps its last state."""
        written = int(rows.written[number])
        for tensor in kept.tensors:
            data = self.rows[tensor.name]
            before = data[int(rows.first[number]) if first else written]
            assert (before == (numbers[position - 1] if position else 0)).all()
            data[written] = numbers[position]

    def check_rows(self, kept: LayerCache, rows: Any, i: int, position: int, numbers: Array) -> None:
        written, first, last = int(rows.written[i]), int(rows.first[i]), int(rows.last[i])
        (before,) = [b.row_ranges for b in rows.prefixes if b.start <= i < b.stop] or [()]
        assert last == written and first % BLOCK == 0, "blocks of attention begin where rows do"
        assert all(row % BLOCK == n % BLOCK == 0 for row, n in before)
        seen = [row + i for row, n in (*before, (first, written + 1 - first)) for i in range(n)]
        assert seen == sorted(seen) and seen[0] >= 0
        seen = seen[-kept.window :] if kept.window else seen
        assert len(seen) == min(position + 1, kept.window or position + 1)
        for tensor in kept.tensors:
            data = self.rows[tensor.name]
            data[written] = numbers[position]
            assert (data[seen] == numbers[position + 1 - len(seen) : position + 1][:, None]).all()


ACTIONS = st.tuples(st.integers(0, 6), st.integers(0, 1000), st.integers(0, 1000))


def act(record: RecordingMemory, kind: str, number: int, action: int, a: int, b: int) -> None:
    memory, texts = record.memory, record.texts
    handles = [*texts]
    if action == 0 or not handles:
        handle = memory.allocate(1, 900)
        assert (handle is not None) == (len(handles) < N_SEQUENCES or kind == "all")
        if handle is not None:
            texts[handle] = []
        return
    handle = handles[a % len(handles)]
    match action:
        case 1:
            memory.free(handle)
            del texts[handle]
        case 2 | 3:  # tokens of it and of other sequences
            parts = [(handle, [(number * 7 + i * b) % 50 for i in range(1 + b % MAX_BATCH)])]
            parts += [(other, [b % 50]) for other in handles if other is not handle and action == 3]
            parts = [(h, tokens) for h, tokens in parts if memory.grow(h, h.used + len(tokens))]
            parts[0] = (parts[0][0], parts[0][1][: MAX_BATCH - len(parts) + 1])
            record.evaluate(parts)
            if b % 3 == 0:
                memory.mark(handle, max(1, handle.used - b % 20))
        case 4:
            n = b % (handle.used + 1)
            reached = memory.reach(handle, n)
            assert reached <= n and memory.reach(handle, reached) == reached
            assert memory.rewind(handle, n) == (reached == n)
            assert memory.rewind(handle, reached) and handle.used == reached
        case 5:  # replace it by a fork of another sequence
            other = handles[b % len(handles)]
            n = memory.reach(other, (a * b) % (other.used + 1))
            if other is not handle:
                memory.free(handle)
                del texts[handle]
            forked = memory.fork(other, n, n + 1, n + a)
            assert forked is not None or len(texts) == N_SEQUENCES or kind == "all"
            if forked is not None:
                assert forked.used == n
                texts[forked] = texts[other][:n]
        case 6:  # read it and write it back in two parts, possibly shortened
            tails = memory.tails(handle)
            assert handle.used in tails or not handle.used
            if not tails or not handle.used:
                return
            tail = tails[b % len(tails)]
            n = memory.tail_reach(tail, max(tail - a % 3, 0))
            kept, cells = memory.read_tail(handle, tail), memory.read(handle, 0, tail)
            assert kept.size == memory.tail_bytes(tail) and memory.is_valid_tail(kept, tail)
            assert memory.is_valid(cells, tail) and n <= tail
            known = 0 if memory.has_tails else b % (n + 1)
            memory.rewind(handle, known)
            if n and memory.grow(handle, n):
                memory.write_tail(handle, tail, kept)
                half = (n - known) // 2
                memory.write(handle, half, cells, skip=known)
                memory.write(handle, n - known - half, cells, skip=known + half)
                texts[handle] = texts[handle][:n]


def read(record: RecordingMemory, handle: Handle, n: int, token: int | None = None) -> None:
    """Extend a sequence to `n` tokens."""
    while handle.used < n:
        tokens = range(handle.used, min(handle.used + MAX_BATCH, n))
        record.evaluate([(handle, [i % 50 if token is None else token for i in tokens])])


def allocate(record: RecordingMemory, n: int = 1000) -> Handle:
    handle = record.memory.allocate(n)
    assert handle is not None
    record.texts[handle] = []
    return handle


def end(record: RecordingMemory) -> None:
    for handle in record.texts:
        if record.memory.grow(handle, handle.used + 1):
            record.evaluate([(handle, [1])])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40)
@given(history=st.lists(ACTIONS, max_size=40))
def test_any_sequence_of_operations(kind: str, history: list[tuple[int, int, int]]) -> None:
    record = RecordingMemory(KINDS[kind])
    for number, (action, a, b) in enumerate(history):
        act(record, kind, number, action, a, b)
    end(record)


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_of(range(6), 2))
@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences_of_operations(kind: str, seed: int) -> None:
    """Sequences grow, share prefixes and diverge."""
    rng = random.Random(seed)
    record = RecordingMemory(KINDS[kind])
    shared = 0
    for number in range(150):
        (action,) = rng.choices(range(7), (2, 1, 6, 6, 2, 4, 1))
        act(record, kind, number, action, rng.randrange(1000), rng.randrange(1000))
        shared = max(shared, record.memory.n_shared)
    end(record)
    assert shared >= BLOCK or record.memory.has_states


@pytest.mark.slow
def test_marks_can_be_rewound_to() -> None:
    """The newest marks stay available while the sequence grows; older ones are dropped."""
    assert SNAPSHOTS == 2
    found = {"windows": [700, 450, 449, 299, 0], "states": [700, 450, 300, 0, 0], "hybrid": [700, 450, 300, 0, 0]}
    for kind, points in found.items():
        record = RecordingMemory(KINDS[kind])
        handle = allocate(record, 2000)
        for mark in (100, 300, 450):
            record.memory.mark(handle, mark)
        read(record, handle, 500)
        for _ in range(200):
            record.evaluate([(handle, [3])])
        assert [record.memory.reach(handle, n) for n in (700, 460, 449, 299, 99)] == points


def test_states_are_saved_periodically_without_a_mark() -> None:
    record = RecordingMemory(KINDS["states"])
    handle = allocate(record, 2000)
    read(record, handle, 1100)
    assert record.memory.reach(handle, 1050) == 1024 and record.memory.reach(handle, 1023) == 0


def test_a_window_that_saves_no_memory_is_stored_in_full() -> None:
    for n_sequences, windowed in ((1, True), (10, True), (11, False)):
        memory = Memory(
            [KeysValues(1, 1, WINDOW)],
            MemoryOptions(n_cells=4096, n_sequences=n_sequences, max_batch=MAX_BATCH, slack=20),
        )
        rows = memory[0].part.n_rows
        assert memory.has_tails == windowed and (rows < 4096) == windowed
    assert not Memory([KeysValues(1, 1, WINDOW)], MemoryOptions(n_cells=1 << 20, whole=True)).has_tails


def test_sizes_in_bytes() -> None:
    f16 = TensorType.F16
    memory = Memory(
        [KeysValues(64, 32), Latent(48), RecurrentState((10, 20))],
        MemoryOptions(n_cells=1000, n_sequences=5, type_v=TensorType.Q8_0),
    )
    assert memory.n_cells == 1024 and memory.types == (f16, TensorType.Q8_0)
    assert [memory.layer_bytes(i) for i in range(3)] == [1024 * (128 + 34), 1024 * 96, 5 * 4 * 4 * 30]
    assert [memory.read_bytes(i, 100) for i in range(3)] == [100 * (128 + 34), 100 * 96, 4 * 30]
    assert memory.token_bytes == 128 + 34 + 96 and memory.tail_bytes(9) == 4 * 30 and memory.tail_bytes(0) == 0


def test_a_layer_with_shared_memory_has_no_tensors_of_its_own() -> None:
    memory = Memory(
        [KeysValues(64, 32, WINDOW), KeysValues(64, 64), SharedMemory(0), SharedMemory(1)], MemoryOptions(n_cells=4096)
    )
    assert memory[2] == memory[0] and memory[3] == memory[1] and len(memory) == 4
    assert [memory.layer_bytes(i) for i in (2, 3)] == [0, 0] and memory.token_bytes == 2 * 128
    assert [memory.read_bytes(i, 100) for i in (2, 3)] == [memory.read_bytes(i, 100) for i in (0, 1)]
    assert len(memory.tensors) == 4 and set(memory.layer_of.values()) == {0, 1}


def test_invalid_calls_raise() -> None:
    record = RecordingMemory(KINDS["hybrid"])
    handle = allocate(record, 10)
    for span in (Span(handle, 1, 1), Span(handle, 0, 0), Span(handle, 0, 300)):
        with pytest.raises(ValueError):
            record.memory.place([span])
    with pytest.raises(ValueError, match="tail of 5"):
        record.memory.write_tail(handle, 5, np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match="3 tokens"):
        record.memory.write(handle, 3, np.zeros(7, np.uint8))
    for head_dim, type, message in ((40, TensorType.Q8_0, "whole blocks"), (32, TensorType.Q4_K, "supported are")):
        with pytest.raises(UnsupportedModel, match=message):
            check_types(head_dim, [type])


@pytest.mark.parametrize("kind", ["windows", "hybrid"])
def test_rewinding_token_by_token(kind: str) -> None:
    """Rewind as far as the window is still stored."""
    for used in (180, 190, 200, 230):
        record = RecordingMemory([layer for layer in KINDS[kind] if not isinstance(layer, RecurrentState)])
        handle = allocate(record)
        read(record, handle, used)
        n, memory = used, record.memory
        while memory.rewind(handle, n):
            read(record, handle, n + 1)
            n -= 1
        assert used - 170 < n < used - 1 and not memory.rewind(handle, n)
        assert memory.rewind(handle, n + 1)


def test_snapshots_beyond_a_rewind_are_dropped() -> None:
    record = RecordingMemory(KINDS["windows"][:1])
    handle, memory = allocate(record), record.memory
    memory.mark(handle, 110)
    read(record, handle, 300)
    assert memory.reach(handle, 200) == 110 and memory.rewind(handle, 104)
    read(record, handle, 320, token=7)
    assert memory.reach(handle, 110) == 104 and memory.rewind(handle, 104)
    read(record, handle, 330)
    record = RecordingMemory(KINDS["states"])
    handle, memory = allocate(record), record.memory
    for mark in (50, 110):
        memory.mark(handle, mark)
    read(record, handle, 300)
    assert memory.rewind(handle, 50)
    read(record, handle, 320, token=7)
    assert memory.reach(handle, 110) == 50


def test_a_snapshot_can_be_used_several_times() -> None:
    record = RecordingMemory(KINDS["windows"][:1])
    handle, memory = allocate(record), record.memory
    memory.mark(handle, 110)
    read(record, handle, 300)
    for token in (7, 8, 9):
        assert memory.rewind(handle, 110)
        read(record, handle, 130 + 100 * (token == 8), token=token)
    assert memory.rewind(handle, 110)
    read(record, handle, 200)


def test_a_failed_fork_leaves_no_cells_in_use() -> None:
    record = RecordingMemory(KINDS["hybrid"])
    memory = record.memory
    first = allocate(record, 90)
    record.evaluate([(first, [*range(40)])])
    before, copy = memory.n_used, record.copy_rows

    def fail(tensors: Sequence[Tensor], src: int, dst: int, n: int) -> None:
        raise OSError("the device is gone")

    record.copy_rows = fail  # type: ignore[method-assign]
    for _ in range(5):
        with pytest.raises(OSError, match="gone"):
            memory.fork(first, 40, 60)
    assert memory.n_used == before and memory.n_shared == 0
    record.copy_rows = copy  # type: ignore[method-assign]
    assert memory.fork(first, 40, 60) is not None


def test_writing_beyond_a_run_is_rejected() -> None:
    record = RecordingMemory(KINDS["all"])
    handle, memory = allocate(record, 40), record.memory
    with pytest.raises(ValueError, match="65 tokens"):
        memory.write(handle, 65, np.zeros(65 * memory.token_bytes, np.uint8))


@pytest.mark.parametrize("n_drafted", [0, 3])
def test_each_kind_of_state_has_rows_of_its_own(n_drafted: int) -> None:
    """The current state, snapshots, the periodic one, and those while draft tokens are verified."""
    states = States("_s", 2, n_drafted)
    for home in (0, 4 + n_drafted):
        place = states._place(home)
        temporary = states._temporary_rows(place)
        assert temporary == [home, *range(home + 4, home + 4 + n_drafted)]
        place.rows = {n: home + n for n in range(4 + n_drafted)}
        assert states.snapshots(place) == [1, 2, 3] and states._snapshot_row(place) == home + 1
    assert states.n_rows == 2 * (4 + n_drafted)
