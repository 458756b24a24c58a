"""Slots, requests, the queue and the statistics of the scheduler, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.engine.drafts.contract import Draft
from llamado.engine.errors import EngineClosed, QueueFull
from llamado.engine.request import Event, Progress, Timings
from llamado.engine.sampling.rng import Seed
from llamado.engine.scheduler import queue as queue_module
from llamado.engine.scheduler import slots as slots_module
from llamado.engine.scheduler.queue import Queue, SlotTask
from llamado.engine.scheduler.slots import Slot, Task, choose_slot
from llamado.engine.scheduler.statistics import Buckets, Statistics

from .fake import req


def task(prompt: Sequence[int] = (1, 2, 3), n_predict: int = 8, **fields: Any) -> Task:
    return Task(req([*prompt], n_predict, **fields), lambda event: None, sampler=cast(Any, None), seed=cast(Seed, None))


def slot(id: int, tokens: Sequence[int] = (), last_used: float = 0.0, n_ctx: int = 512) -> Slot:
    """Return an idle slot with tokens in its cells."""
    found = Slot(id, n_ctx)
    found.tokens[: len(tokens)] = tokens
    found.length = len(tokens)
    found.t_last_used = last_used
    if tokens:
        found.handle = cast(Any, SimpleNamespace(used=len(tokens), need=99))
    return found


def chosen(slots: list[Slot], prompt: Sequence[int], similarity: float = 0.1, **fields: Any) -> int | None:
    array: NDArray[np.int32] = np.array(prompt, np.int32)
    found = choose_slot(slots, task(prompt, **fields), array, similarity)
    return None if found is None else found.id


def test_a_request_gets_the_slot_that_it_names() -> None:
    slots = [slot(0), slot(1)]
    assert chosen(slots, [1], id_slot=1) == 1 and chosen(slots, [1], id_slot=7) is None
    slots[1].held = True
    assert chosen(slots, [1], id_slot=1) is None and chosen(slots, [1]) == 0
    slots[0].task = task()
    assert chosen(slots, [1]) is None


def test_the_slot_that_is_idle_for_longest_is_taken() -> None:
    assert chosen([slot(0, last_used=3.0), slot(1, last_used=1.0), slot(2, last_used=2.0)], [1]) == 1
    assert chosen([slot(1), slot(0), slot(2)], [1]) == 0  # equally long


def test_similar_prompts_continue_in_their_slot() -> None:
    text = list(range(100, 140))
    slots = [slot(0, [5] * 10, 1.0), slot(1, text, 2.0)]
    assert chosen(slots, [*text, 1]) == 1 and chosen(slots, [*text, 1], similarity=0.0) == 0
    assert (
        chosen(slots, [*text[:20], 1, 1]) == 1 and chosen(slots, [*text[:19], 1, 1]) == 0
    )  # it would lose more than half
    # Not more than a tenth of the prompt.
    short = [slot(0, [5] * 10, 1.0), slot(1, [7, 8], 2.0)]
    assert chosen(short, [7, 8, *[1] * 18]) == 0 and chosen(short, [7, 8, *[1] * 17]) == 1


def test_a_long_sequence_is_kept_if_a_slot_is_empty() -> None:
    text = list(range(100, 300))
    slots = [slot(0, [5] * 10, 1.0), slot(1, text, 2.0), slot(2, (), 3.0)]
    assert chosen(slots, [*text[:136], 1]) == 2  # it would lose 64 tokens
    assert chosen(slots, [*text[:137], 1]) == 1
    assert chosen(slots[:2], [*text[:100], 1]) == 1 and chosen(slots[:2], [*text[:99], 1]) == 0


def test_common_prefixes_are_in_the_cells() -> None:
    one = slot(0, [1, 2, 3, 4])
    assert one.handle is not None
    one.handle = cast(Any, SimpleNamespace(used=3))
    prompt = np.array([1, 2, 3, 4, 5], np.int32)
    assert one.common_prefix(prompt, ()) == 3 and one.common_prefix(prompt, (), 4) == 4
    assert one.common_prefix(prompt[:2], ()) == 2 and one.common_prefix(np.array([1, 9], np.int32), ()) == 1
    assert one.common_prefix(prompt, (0.5,)) == 0 and one.pending == 1 and one.used == 3


def test_a_slot_follows_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots_module.time, "perf_counter", lambda: 5.0)
    one, work = slot(3, [1, 2]), task([1, 2, 9, 9], n_predict=3)
    assert one.age == -1 and one.idle and one.snapshot()[:6] == (3, 512, False, -1, None, 2)
    work.id = 7
    one.begin(work, np.array([1, 2, 9, 9], np.int32))
    assert (one.age, one.idle, one.length, one.pending, one.n_batchable) == (7, False, 4, 2, 2)
    assert (work.n_cached, work.t_start, one.recall, one.n_inseparable) == (2, 5.0, True, 1)
    one.append(6)
    work.generated.append(6)
    work.n_processed = 2
    found = one.snapshot()
    assert (found.id_task, found.n_prompt_tokens, found.n_prompt_tokens_processed, found.n_prompt_tokens_cache) == (
        7,
        2,
        2,
        2,
    )
    assert (found.is_processing, found.has_next_token, found.n_remain, found.n_decoded) == (True, True, 2, 1)
    one.release()
    assert one.length == 2 and one.idle and one.t_last_used == 5.0 and one.handle is not None and one.handle.need == 0
    assert not one.snapshot().is_processing and one.snapshot().id_task == 7
    assert not one.snapshot().has_next_token


def test_prompt_rows_limit_batches() -> None:
    one, work = slot(0), task(range(1, 101), prompt_probs=True, n_probs=1)
    one.begin(work, np.arange(1, 101, dtype=np.int32))
    assert one.n_batchable == 32
    work.generated.append(1)
    assert one.n_batchable == 100


def test_a_shift_moves_the_tokens_behind() -> None:
    one = slot(0, range(10))
    one.shift(2, 3)
    assert one.length == 7 and one.tokens[:7].tolist() == [0, 1, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("how", ["shift", "release", "discard"])
def test_draft_tokens_in_flight_are_dropped_with_what_they_follow(how: str) -> None:
    one, work = slot(0, range(10)), task()
    one.discard_drafts()  # there is no request
    one.task = work
    work.ahead.add(Draft(0, [7, 8], [0, 0]))
    assert len(work.ahead) == 2 and work.ahead.epoch == 0
    if how == "shift":
        one.shift(2, 3)
    elif how == "release":
        one.release()
    else:
        one.discard_drafts()
    assert len(work.ahead) == 0 and work.ahead.epoch == 1
    assert (one.task is None) == (how == "release")


def test_budgets_and_timings(monkeypatch: pytest.MonkeyPatch) -> None:
    work = task(n_predict=2)
    assert [task(n_predict=-1).budget, work.budget] == [-1, 2]
    work.generated += [1, 2, 3]
    assert work.budget == 0
    work.n_cached, work.n_processed, work.t_start, work.t_first, work.t_last = 4, 5, 1.0, 1.5, 3.5
    assert work.timings() == Timings(4, 5, 500.0, 3, 2000.0)
    work.t_last = 1.5
    assert work.timings().predicted_ms == 1e-3
    work.ahead.n_drafted, work.ahead.n_accepted = 5, 0
    assert (work.timings().draft_n, work.timings().draft_n_accepted) == (5, 0)
    fresh = task()
    assert fresh.timings() == Timings(0, 0, 0.0, 0, 0.0)
    events: list[tuple[Task, Event]] = []
    for timed in (False, True):
        one = task(timings_per_token=timed)
        one.outbox, one.t_start, one.n_cached = events, 1.0, 1
        one.queue_progress(2, 1.25)
        event = events.pop()[1]
        assert isinstance(event, Progress)
        assert (event.total, event.cache, event.processed, event.time_ms) == (3, 1, 2, 250)
        assert (event.timings is None) != timed and (not timed or cast(Timings, event.timings).prompt_ms == 250.0)


def test_the_queue_refuses_with_the_pace_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module.time, "monotonic", lambda: 100.0)
    queue = Queue([slot(0), slot(1)], 4)
    for _ in range(5):
        queue.check()
        queue.add(task())
    queue.check()
    queue.add(task())
    assert list(queue.tasks) == list(range(6)) and queue.has_arrivals and not queue.is_empty
    for ends, seconds in (([], 1), ([90.0], 20), ([90.0, 95.0], 10), ([99.9], 1), ([0.0], 60), ([80.0] * 7, 6)):
        queue.ends.clear()
        queue.ends.extend(ends)
        with pytest.raises(QueueFull) as full:
            queue.check()
        assert (full.value.n_waiting, full.value.retry_after) == (4, seconds), ends
    queue.cancel(2)
    queue.cancel(99)
    assert [one.cancelled for one in queue.tasks.values()] == [False, False, True, False, False, False]
    queue.close(5.0)
    queue.close(9.0)
    assert queue.deadline == 105.0
    for add in (lambda: queue.add(task()), lambda: queue.add_slot_task(SlotTask("erase", 0))):
        with pytest.raises(EngineClosed):
            add()


def test_slot_tasks_are_limited() -> None:
    for most, allowed in ((2, 2), (0, 1)):
        queue = Queue([slot(0)], most)
        for _ in range(allowed):
            queue.add_slot_task(SlotTask("erase", 0))
        assert queue.n_deferred == allowed and not queue.is_empty
        with pytest.raises(QueueFull):
            queue.add_slot_task(SlotTask("erase", 0))


def test_counts_of_batches_and_answers() -> None:
    statistics = Statistics()
    statistics.evaluated(0, 9.0, 2)
    assert (statistics.n_decode, statistics.n_busy, statistics.n_prompt, statistics.prompt_seconds) == (1, 2, 0, 0.0)
    for n_prompt, seconds, pace in ((15, 1.0, 0.0), (16, 2.0, 8.0), (40, 1.0, 0.7 * 8 + 0.3 * 40), (16, 0.0, None)):
        statistics.evaluated(n_prompt, seconds, 1)
        assert pace is None or statistics.prompt_pace == pytest.approx(pace)
    assert (statistics.n_decode, statistics.n_busy, statistics.n_prompt, statistics.prompt_seconds) == (5, 6, 87, 4.0)
    statistics.finished(5, Timings(predicted_ms=250.0))
    statistics.finished(0, Timings())
    counters = statistics.counters()
    assert statistics.n_steps == 4 and statistics.predicted_seconds == 0.25
    assert counters[:9] == (87, 4.0, 0, 0, 4, 0.25, 5, 6, 0) and counters[9:13] == (0, 0, 0, ())


def test_bounds_belong_to_their_bucket() -> None:
    buckets = Buckets((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        buckets.add(value)
    assert buckets.histogram() == ((1.0, 2.0), (2, 2, 1), 7.5)
    statistics = Statistics()
    names = ("first_token", "inter_token", "queue", "batch_tokens")
    for i, name in enumerate(names):
        getattr(statistics, name).add(0.0008 + i)
    counters = statistics.counters()
    assert [histogram.sum for histogram in counters[13:17]] == [0.0008, 1.0008, 2.0008, 3.0008]
    assert counters[13].bounds[0] == 0.001 and counters[13].bounds[-1] == 120 and counters[14].bounds[-1] == 2.5
    assert counters[16].bounds == tuple(2.0**i for i in range(12))
