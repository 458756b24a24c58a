"""Prefix sharing: the slot a request takes its prefix from, and the sequences that are kept, one decision at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.engine.cache.disk_cache import DiskRead
from llamado.engine.cache.prompt_cache import CellReader
from llamado.engine.options import EngineOptions
from llamado.engine.request import GenerationParams, Request
from llamado.engine.scheduler.prefix import MIN_SHARED, MIN_STORE, SequenceCache
from llamado.engine.scheduler.queue import Queue
from llamado.engine.scheduler.slots import Slot, Task
from llamado.engine.scheduler.statistics import Statistics

from .fake import FakeForward

PROMPT: NDArray[np.int32] = np.arange(1, 201, dtype=np.int32)


@pytest.fixture
def slots() -> list[Slot]:
    return [Slot(0, 1024), Slot(1, 1024)]


@pytest.fixture
def sequences(slots: list[Slot], monkeypatch: pytest.MonkeyPatch) -> SequenceCache:
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)
    options = EngineOptions(cache_ram=-1)
    return SequenceCache(
        FakeForward(), Queue(slots, options.max_queue), Statistics(), options, np.empty(0, np.int32), lambda lost: None
    )


def fill(sequences: SequenceCache, slot: Slot, n: int, used: int) -> None:
    """Fill a slot with the first `n` tokens of the prompt, of which `used` are evaluated."""
    slot.tokens[:n] = PROMPT[:n]
    slot.length = n
    slot.handle = sequences.memory.allocate(n)
    assert slot.handle is not None
    slot.handle.used = used


def task(number: int, **params: Any) -> Task:
    request = Request(prompt=PROMPT.tolist(), params=GenerationParams(**params))
    found = Task(request, lambda event: None, sampler=cast(Any, None), seed=cast(Any, None))
    found.id = number
    return found


def leader(sequences: SequenceCache, slots: list[Slot], age: int, stored: int = 0) -> Slot | None:
    sequences._find_leader(slots[1], PROMPT, (), age, MIN_SHARED - 1, stored)
    return None if slots[1].leader is None else slots[1].leader[0]


def test_request_waits_for_an_older_one_evaluating_its_prefix(sequences: SequenceCache, slots: list[Slot]) -> None:
    fill(sequences, slots[0], 150, used=10)
    slots[0].task = task(5)
    assert leader(sequences, slots, age=6) is slots[0]


@pytest.mark.parametrize("age", [5, 4])
def test_a_request_does_not_wait_for_a_younger_one(sequences: SequenceCache, slots: list[Slot], age: int) -> None:
    """Two requests that wait for each other would never continue."""
    fill(sequences, slots[0], 150, used=10)
    slots[0].task = task(5)
    assert leader(sequences, slots, age=age) is None


@pytest.mark.parametrize(("stored", "waits"), [(149, True), (150, False), (199, False)])
def test_request_does_not_wait_for_a_stored_prefix(
    sequences: SequenceCache, slots: list[Slot], stored: int, waits: bool
) -> None:
    fill(sequences, slots[0], 150, used=10)
    slots[0].task = task(5)
    assert (leader(sequences, slots, age=6, stored=stored) is not None) == waits


def test_evaluated_prefix_is_shared_whatever_its_age(sequences: SequenceCache, slots: list[Slot]) -> None:
    fill(sequences, slots[0], 150, used=150)
    slots[0].task = task(5)
    assert leader(sequences, slots, age=4, stored=150) is slots[0]


@pytest.mark.parametrize(
    ("n", "cache_prompt", "waits"),
    [(150, True, True), (150, False, False), (MIN_SHARED, True, True), (MIN_SHARED - 1, True, False)],
)
def test_a_request_that_lost_its_cells_waits_for_its_prefix_again(
    sequences: SequenceCache, slots: list[Slot], n: int, cache_prompt: bool, waits: bool
) -> None:
    fill(sequences, slots[0], n, used=10)
    slots[0].task = task(5)
    slots[1].begin(task(6, cache_prompt=cache_prompt), PROMPT)
    sequences.drop(slots[1])
    sequences.follow(slots[1])
    assert (slots[1].leader is not None) == waits


def kept(sequences: SequenceCache) -> list[int]:
    assert sequences.store is not None
    return [stored.tokens.size for stored in sequences.store.all()]


@pytest.mark.parametrize(("n", "n_same", "keeps"), [(150, 0, True), (150, 86, True), (150, 87, False), (63, 0, False)])
def test_sequence_is_stored_if_enough_of_it_would_be_lost(
    sequences: SequenceCache, slots: list[Slot], n: int, n_same: int, keeps: bool
) -> None:
    assert MIN_STORE == 64
    fill(sequences, slots[0], n, used=n)
    sequences._store(slots[0], n_same)
    assert kept(sequences) == [n] * keeps


def test_sequence_still_loading_from_disk_is_not_stored(sequences: SequenceCache, slots: list[Slot]) -> None:
    """Its cells are incomplete."""
    fill(sequences, slots[0], 150, used=150)
    slots[0].load = cast(DiskRead, object())
    sequences._store(slots[0])
    assert kept(sequences) == []


def test_sequence_held_by_another_slot_is_not_stored(sequences: SequenceCache, slots: list[Slot]) -> None:
    for slot in slots:
        fill(sequences, slot, 150, used=150)
    sequences._store(slots[0])
    assert kept(sequences) == []


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> SequenceCache:
    """Return the sequences of two idle slots, which take all cells, and of a third slot whose leader is the first."""
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)
    slots, options = [Slot(i, 1024) for i in range(3)], EngineOptions(cache_ram=-1)
    forward = FakeForward(256)
    full = SequenceCache(
        forward, Queue(slots, options.max_queue), Statistics(), options, np.empty(0, np.int32), lambda lost: None
    )
    for slot in slots[:2]:
        fill(full, slot, 120, used=120)
    slots[1].tokens[:120] = PROMPT[80:]
    slots[2].begin(task(5), PROMPT)
    full._find_leader(slots[2], PROMPT, (), 5, MIN_SHARED - 1, 0)
    assert slots[2].leader is not None and slots[2].leader[0] is slots[0]
    return full


def test_an_idle_leader_keeps_its_cells_as_long_as_another_slot_has_some(full: SequenceCache) -> None:
    """Even if it is the least recently used one."""
    first, second, third = full.slots
    first.t_last_used, second.t_last_used = 1.0, 2.0
    assert full.make_room(third)
    assert first.handle is not None and second.handle is None
    assert third.used >= MIN_SHARED


def test_a_forked_sequence_gets_marks_for_its_own_checkpoints(
    full: SequenceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    marks: list[tuple[Any, int]] = []
    monkeypatch.setattr(type(full.memory), "has_tails", True)
    monkeypatch.setattr(full.memory, "mark", lambda *given: marks.append(given))
    assert full.make_room(full.slots[2])
    assert marks == [(full.slots[2].handle, 120), (full.slots[2].handle, PROMPT.size - 1)]


def test_a_sequence_that_makes_room_for_a_slot_file_is_stored(full: SequenceCache) -> None:
    first, second, third = full.slots
    first.t_last_used, second.t_last_used = 2.0, 1.0
    full.empty(third, 100, ())
    assert first.handle is not None and second.handle is None and third.handle is not None
    assert kept(full) == [120]


@pytest.mark.parametrize("has_tails", [False, True])
@pytest.mark.parametrize("has_cells", [False, True])
def test_a_cancelled_read_leaves_no_half_of_a_sequence_with_states(
    sequences: SequenceCache, slots: list[Slot], has_tails: bool, has_cells: bool
) -> None:
    """Cells are of use up to any token, states only as a whole."""
    rewound: list[tuple[Any, int]] = []
    memory = SimpleNamespace(has_tails=has_tails, rewind=lambda *given: rewound.append(given))
    sequences.memory = cast(Any, memory)
    cancelled: list[bool] = []
    slot = slots[0]
    slot.handle = cast(Any, "handle") if has_cells else None
    slot.load = cast(Any, SimpleNamespace(cancel=lambda: cancelled.append(True)))
    sequences.cancel_stale_reads()
    assert slot.load is None and cancelled == [True]
    assert rewound == ([("handle", 0)] if has_tails and has_cells else [])


def test_a_reset_leaves_no_sequence(sequences: SequenceCache, slots: list[Slot]) -> None:
    fill(sequences, slots[0], 100, 100)
    slots[0].snapshots.put(50, np.zeros(4, np.uint8))
    sequences.reset()
    assert (slots[0].handle, slots[0].length, dict(slots[0].snapshots.tails)) == (None, 0, {})
