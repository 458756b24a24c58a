"""Parts of the prompt cache without an engine: costs of reading, limits, checkpoints, and the layout of block files."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.engine.cache import prompt_cache
from llamado.engine.cache.blocks import BadBlock, path_of, read_data, read_head, regroup, write_block
from llamado.engine.cache.prompt_cache import CellReader, PromptStore, ReadCost, ReadRate, StoredSequence, shared
from llamado.engine.cache.snapshots import Snapshots, points, thin_out


def tokens(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def test_common_prefixes() -> None:
    assert shared(tokens(1, 2, 3), tokens(1, 2, 4)) == 2 and shared(tokens(1, 2), tokens(1, 2, 4)) == 2
    assert shared(tokens(5), tokens(1)) == shared(tokens(), tokens(1)) == 0


def test_reading_costs_a_time_per_call_and_per_cell() -> None:
    cost = ReadCost(8, 0.018, 32, 0.042)  # 10 ms per call, 1 ms per cell
    assert cost.seconds(100, 32) == pytest.approx(4 * 0.010 + 0.100)
    assert cost.seconds(32, 32) == pytest.approx(0.042) and cost.seconds(33, 32) == pytest.approx(0.053)
    assert ReadCost(8, 0.02, 32, 0.01).seconds(64, 32) == pytest.approx(0.04)  # more cells cannot cost less
    assert ReadCost(8, 0.001, 32, 0.1).seconds(32, 32) == pytest.approx(0.099 / 24 * 32)
    cost.note(10, 0.04)  # twice as long
    assert cost.seconds(10, 10) == pytest.approx(0.02 * 1.3)
    cost.note(10, 1000.0)  # at most ten times
    assert cost.seconds(10, 10) == pytest.approx(0.02 * 1.3 * 3.7)
    nothing = ReadCost(8, 0.0, 32, 0.0)
    nothing.note(10, 1.0)
    assert nothing.seconds(10, 1) == 0


def test_reading_from_disk_is_tried_again_after_it_did_not_pay() -> None:
    rate = ReadRate()
    assert rate.pays(10**12, 1, 1e9)  # unknown
    rate.note(1000, 1.0)
    rate.note(2000, 1.0)
    assert rate.pays(1300, 10, 10.0) and not rate.pays(1301, 10, 10.0)  # 0.7 and 0.3 of them
    assert [rate.pays(10**9, 1, 1.0) for _ in range(16)] == [False] * 15 + [True]
    rate.note(1, 0.0)
    assert rate.pays(10**6, 1, 1.0) and not rate.pays(10**6 + 1, 1, 1.0)


class FakeMemory:
    """Takes 10 ms for a call and 1 ms for a cell."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads: list[int] = []
        self.now, self.factor = 0.0, 1.0
        monkeypatch.setattr(prompt_cache.time, "perf_counter", lambda: self.now)

    def read(self, handle: object, start: int, n: int) -> NDArray[np.uint8]:
        self.reads.append(n)
        self.now += self.factor * (0.010 + 0.001 * n)
        return np.zeros(n, np.uint8)


def test_cells_are_read_if_that_is_faster_than_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(monkeypatch)
    reader = CellReader(cast(Any, memory), 100)
    handle = cast(Any, type("Handle", (), {"used": 100}))
    pace = 100 / (2 * 0.110)  # reading and writing back takes as long as computing
    assert reader.pays(handle, 0.999 * pace) and not reader.pays(handle, 1.001 * pace)
    assert memory.reads == [8, 32]
    reader.read(handle, 0, 100)
    assert reader.pays(handle, 0.999 * pace)
    memory.factor = 2.0
    reader.read(handle, 0, 100)
    assert not reader.pays(handle, 0.999 * pace) and reader.pays(handle, 0.999 * pace / 1.3)
    assert [reader.pays(handle, 1e9) for _ in range(17)] == [False] * 17 and memory.reads[2:] == [100, 100, 8, 32]


def test_slow_links_are_measured_with_few_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = FakeMemory(monkeypatch)
    memory.factor = 0.1001 / 0.018
    reader = CellReader(cast(Any, memory), 100)
    handle = cast(Any, type("Handle", (), {"used": 64}))
    reader.pays(handle, 1.0)
    assert memory.reads == [8]
    assert reader._cost is not None and reader._cost.seconds(32, 32) == pytest.approx(4 * 0.1001)


def test_pieces_of_a_range_of_cells() -> None:
    pieces = [(4, np.zeros(4, np.uint8)), (4, np.ones(4, np.uint8)), (2, np.full(2, 2, np.uint8))]
    stored = StoredSequence(tokens(*range(10)), (), pieces, {}, 0)

    def found(first: int, end: int) -> list[tuple[int, int, int]]:
        return [(at, n, int(data[0])) for at, n, data in stored.pieces(first, end)]

    assert found(0, 10) == [(0, 4, 0), (4, 4, 1), (8, 2, 2)]
    assert found(3, 5) == [(0, 4, 0), (4, 1, 1)] and found(4, 8) == [(4, 4, 1)] and found(8, 9) == [(8, 1, 2)]
    assert found(5, 5) == [(4, 1, 1)] and found(0, 0) == []


def read(start: int, n: int) -> NDArray[np.uint8]:
    return np.arange(start, start + n).astype(np.uint8)


def test_totals_and_listed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(prompt_cache.time, "time", lambda: float(next(clock)))
    store = PromptStore(None, 10, 4)
    for n, first in ((3, 1), (5, 2), (6, 3)):
        assert store.put(tokens(*range(first, first + n)), read)
    assert (store.n_tokens, store.nbytes, len(store)) == (14, 14 * 14, 3)
    assert [one.n_tokens for one in store.entries] == [6, 5, 3] and store.entries is store.entries
    assert store.find(tokens(1, 2, 3, 4), 3) == (store.all()[0], 3) and store.all()[0].used == 3.0
    assert [one.n_tokens for one in store.entries] == [3, 6, 5]
    assert store.find(tokens(1, 2), 3) is None and store.holds(tokens(2, 3)) and not store.holds(tokens(2, 4))
    assert [one.n_tokens for one in store.entries] == [5, 3, 6]
    assert store.put(tokens(1, 2, 3, 4), read)  # in place of its prefix
    assert (store.n_tokens, store.nbytes, len(store)) == (15, 15 * 14, 3)
    assert [n for n, _ in store.all()[0].cells] == [3, 1]
    monkeypatch.setattr(prompt_cache, "_SHOWN", 2)
    store.put(tokens(9), read)
    assert [one.n_tokens for one in store.entries] == [1, 4]
    store.clear()
    assert (store.n_tokens, store.nbytes, len(store), store.entries) == (0, 0, 0, ())


def test_the_longest_and_then_the_newest_prefix_is_found() -> None:
    store = PromptStore(None, 1, 4)
    for last in (7, 8):
        store.put(tokens(1, 2, 3, last), read)
    assert store.find(tokens(1, 2, 3, 9), 1) == (store.all()[0], 3) and store.all()[0].tokens[-1] == 8
    assert store.find(tokens(1, 2, 3, 7), 1) == (store.all()[0], 4) and store.all()[0].tokens[-1] == 7


def test_a_longer_sequence_needs_only_the_memory_beyond_its_prefix() -> None:
    gone: list[int] = []
    store = PromptStore(100, 6, 4, dropped=lambda one: gone.append(one.tokens.size))
    assert store.put(tokens(10, 11, 12, 13), read) and store.put(tokens(1, 2, 3), read)  # 40 and 30 bytes
    assert store.put(tokens(1, 2, 3, 4, 5, 6), read) and gone == [] and store.nbytes == 100
    assert store.put(tokens(1, 2, 3, 4, 5, 6, 7), read) and gone == [4] and store.nbytes == 70


def test_half_of_the_limit_can_be_reserved() -> None:
    gone: list[int] = []
    store = PromptStore(100, 6, 4, dropped=lambda one: gone.append(one.tokens.size))
    assert store.put(tokens(1, 2), read) and store.put(tokens(3, 4, 5, 6, 7), read)  # 20 and 50 bytes
    assert store.reserve(30) and gone == []
    assert store.reserve(20) and gone == [2] and store.reserved == 50
    assert not store.reserve(1) and store.reserved == 50
    store.release(1)
    assert store.reserve(1) and gone == [2]
    assert store.put(tokens(*range(10, 16)), read) and gone == [2, 6]  # too large for what is left
    assert store.put(tokens(*range(20, 25)), read) and gone == [2, 6, 5] and store.nbytes == 50
    small = PromptStore(50, 6, 4)
    assert not small.put(tokens(*range(6)), read) and small.put(tokens(*range(5)), read)
    assert PromptStore(None, 1, 1).reserve(10**12)


CONTROL = tokens(90, 95)


@pytest.mark.parametrize(
    ("prompt", "every", "found"),
    [
        ([1] * 10, 0, [9]),
        ([1] * 10, 4, [4, 8, 9]),
        ([1] * 9, 4, [4, 8]),
        ([90, 1, 90, 1, 1, 95, 1], 0, []),
        ([90, 1, 95], 0, []),
        ([1, 90, 1, 95], 0, [1]),
        ([90] + [1] * 5 + [95] + [1] * 15, 0, [6]),
        ([1, 90] + [1] * 5 + [95] + [1] * 15, 0, [1, 7]),
        ([1, 90] + [1] * 5 + [95] + [1] * 16, 0, [7, 23]),
        ([1], 0, []),
    ],
)
def test_points_of_a_prompt(prompt: list[int], every: int, found: list[int]) -> None:
    assert points(tokens(*prompt), CONTROL, every) == found
    if not {90, 95} & set(prompt):
        assert points(tokens(*prompt), tokens(), every) == found


def test_points_are_thinned_out_where_they_are_close() -> None:
    assert thin_out([50, 10, 12, 30, 50], 4) == [10, 12, 30, 50]
    assert thin_out([10, 12, 30, 50], 3) == [12, 30, 50]
    assert thin_out([10, 12, 30, 50, 70], 4) == [10, 30, 50, 70] and thin_out([5, 6], 0) == [6]


def test_checkpoints_of_a_sequence_share_a_reservation() -> None:
    free = [100]

    def reserve(n: int) -> bool:
        if n > free[0]:
            return False
        free[0] -= n
        return True

    def release(n: int) -> None:
        free[0] += n

    kept = Snapshots(3, reserve, release)
    assert kept.lacks(5) and not Snapshots(0).lacks(5)
    for n in (20, 40, 60):
        assert kept.make_room(30)
        kept.put(n, np.zeros(30, np.uint8))
    assert free == [10] and sorted(kept.tails) == [20, 40, 60]
    assert [n for n in (19, 20, 35, 36, 39, 40, 75, 76) if kept.lacks(n)] == [19, 36, 39, 76]
    kept.put(80, np.zeros(30, np.uint8))
    assert 80 not in kept.tails
    assert kept.make_room(30) and sorted(kept.tails) == [40, 60] and free == [40]
    kept.cut(60)
    assert sorted(kept.tails) == [40, 60]
    kept.cut(59)
    assert sorted(kept.tails) == [40] and free == [70]
    assert not kept.make_room(101) and free == [100] and not kept.tails


def test_layout_of_block_files(tmp_path: Path) -> None:
    parent, data, own = bytes(range(16)), np.arange(10, dtype=np.uint8), tokens(7, -1, 5)
    head = b"llamadoc" + struct.pack("<4IQ", 1, 1, 3, 512, 10) + parent + hashlib.sha256(data).digest()
    head += struct.pack("<3i", 7, -1, 5)
    name = hashlib.sha256(parent + b"tail" + struct.pack("<3i", 7, -1, 5)).digest()[:16]
    path = path_of(tmp_path, "family", name, True)
    assert path == tmp_path / f"family-{name.hex()}.tail" and path_of(tmp_path, "f", b"\1", False).name == "f-01.cells"
    written = write_block(path, parent, 512, own, True, data)
    assert path.read_bytes() == head + hashlib.sha256(head).digest() + data.tobytes()
    assert (written.name, written.end, written.file_bytes, written.digest) == (
        name, 515, path.stat().st_size, hashlib.sha256(data).digest(),
    )  # fmt: skip
    found = read_head(path)
    assert (found.tokens == own).all() and (read_data(found) == data).all() and path.stat().st_mode & 0o777 == 0o600
    assert [getattr(found, field) for field in ("name", "parent", "start", "is_tail", "n_bytes", "digest")] == [
        getattr(written, field) for field in ("name", "parent", "start", "is_tail", "n_bytes", "digest")
    ]
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(("field", "value"), [(8, 2), (12, 2), (16, 0), (16, 4097)])
def test_other_versions_kinds_and_sizes_are_refused(tmp_path: Path, field: int, value: int) -> None:
    path = tmp_path / "x"
    block = write_block(path, bytes(16), 0, tokens(1), False, np.zeros(4, np.uint8))
    path = path.rename(tmp_path / block.name.hex())
    assert read_head(path).end == 1
    changed = bytearray(path.read_bytes())
    changed[field : field + 4] = struct.pack("<I", value)
    path.write_bytes(changed)
    with pytest.raises(BadBlock, match="header is wrong"):
        read_head(path)


def test_cells_are_regrouped_row_by_row() -> None:
    """Two tensors, of one and of two bytes a cell."""

    def piece(first: int, n: int) -> tuple[int, NDArray[np.uint8]]:
        cells = np.arange(first, first + n, dtype=np.uint8)
        return n, np.concatenate([cells, np.repeat(cells + 100, 2)])

    def found(n: int) -> Iterator[tuple[int, list[int]]]:
        for count, data in regroup([piece(0, 3), piece(3, 1), piece(4, 3)], (1, 2), n):
            yield count, data.tolist()

    for n in (1, 2, 4, 7, 9):
        parts = [piece(first, min(n, 7 - first)) for first in range(0, 7, n)]
        assert [*found(n)] == [(count, data.tolist()) for count, data in parts]
    assert [*regroup([], (1,), 4)] == []
