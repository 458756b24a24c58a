"""The draft model over a forward pass of a few lines: its proposals, what it reads, its time, and its memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from llamado.engine.drafts import model as model_module
from llamado.engine.drafts.acceptance import AcceptanceRates
from llamado.engine.drafts.contract import Draft, Proposal
from llamado.engine.drafts.drafts import DraftManager, DraftRequest
from llamado.engine.drafts.head import HeadKind
from llamado.engine.drafts.model import ANY, DraftQuery, ModelDrafter, ModelKind, mark_of
from llamado.engine.drafts.pending_draft import PendingDraft

N_VOCAB, N_CELLS = 20, 100


class CountingForward:
    """A model for which token n + 1 follows token n with probability `sure`. Cells are counted, not stored."""

    n_vocab, max_batch = N_VOCAB, 64

    def __init__(self, clock: list[float]) -> None:
        self.clock, self.sure, self.seconds = clock, 0.9, 0.25
        self.batches: list[list[int]] = []
        self.handles: list[Any] = []
        self.memory = cast(Any, self)
        self.has_states, self.n_before = False, 0

    def allocate(self, need: int, want: int) -> Any:
        if sum(handle.need for handle in self.handles) + need > N_CELLS:
            return None
        self.handles.append(SimpleNamespace(used=0, need=need))
        return self.handles[-1]

    def grow(self, handle: Any, need: int, want: int) -> bool:
        others = sum(other.need for other in self.handles if other is not handle)
        handle.need = need if others + need <= N_CELLS else handle.need
        return bool(handle.need >= need)

    def free(self, handle: Any) -> None:
        self.handles.remove(handle)

    def reach(self, handle: Any, n: int) -> int:
        return int(min(handle.used, n))

    def rewind(self, handle: Any, n: int) -> None:
        handle.used = n

    def start(self, batch: NDArray[np.int32], spans: Sequence[Any], ends: NDArray[np.int32]) -> Any:
        self.batches.append(batch.tolist())
        self.clock[0] += self.seconds
        rows = np.full((len(ends), N_VOCAB), np.log((1 - self.sure) / (N_VOCAB - 1)), np.float32)
        rows[np.arange(len(ends)), (batch[ends] + 1) % N_VOCAB] = np.log(self.sure)
        return SimpleNamespace(result=lambda: rows)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(model_module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(model_module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def forward(clock: list[float]) -> CountingForward:
    return CountingForward(clock)


def kind(forward: CountingForward, n_vocab: int = N_VOCAB, least: float = 0.0, ends: Sequence[int] = ()) -> ModelKind:
    return ModelKind(cast(Any, forward), n_vocab, least=least, ends=frozenset(ends))


GUESS = cast(Any, SimpleNamespace(sample=lambda row, place: int(row.argmax())))


def propose(
    drafts: ModelKind,
    drafter: ModelDrafter,
    history: list[int],
    ahead: Sequence[int] = (),
    most: int = 4,
    **more: float,
) -> Proposal:
    limits = {"least": 0.0, "least_next": 0.0, "confidence": 1.0, **more}
    query = DraftQuery(
        drafter, history, [*ahead], most, GUESS, 0, limits["least"], limits["least_next"], limits["confidence"]
    )
    (found,) = drafts.propose([query], [lambda mark: 0.8])
    return found


def test_a_draft_follows_the_sequence_and_the_tokens_in_flight(forward: CountingForward) -> None:
    drafts = kind(forward)
    drafter = drafts.drafter()
    mark = mark_of(0.9)
    assert propose(drafts, drafter, [1, 2], [3]) == Proposal([4, 5, 6, 7], [mark] * 4)
    assert forward.batches == [[1, 2, 3], [4], [5], [6]]
    forward.batches.clear()
    assert propose(drafts, drafter, [1, 2, 3, 4], [5], 3).tokens == [6, 7, 8] and forward.batches == [[5], [6], [7]]
    forward.batches.clear()  # equal tokens behind another one are read again
    assert propose(drafts, drafter, [1, 2, 3, 4, 9, 6], [7], 1).tokens == [8] and forward.batches == [[9, 6, 7]]
    forward.batches.clear()
    drafter.forget()
    assert propose(drafts, drafter, [1, 3], (), 1).tokens == [4] and forward.batches == [[3]]


def test_drafts_end_where_they_are_not_worth_it(forward: CountingForward) -> None:
    history = [1, 2, 3]
    assert propose(kind(forward, ends=[5]), kind(forward).drafter(), history).tokens == [4, 5]
    assert propose(kind(forward, least=0.91), kind(forward).drafter(), history).tokens == []
    assert propose(kind(forward, least=0.89), kind(forward).drafter(), history).tokens == [4, 5, 6, 7]
    found = [
        len(propose(kind(forward), kind(forward).drafter(), history, least=least).tokens)
        for least in (0.79, 0.65, 0.63)
    ]
    assert found == [1, 1, 2]  # 0.8 and 0.64
    found = [
        len(propose(kind(forward), kind(forward).drafter(), history, least_next=least).tokens)
        for least in (0.65, 0.63, 0.6)
    ]
    assert found == [1, 2, 2]
    assert propose(kind(forward), kind(forward).drafter(), history, least=0.45, confidence=0.5).tokens == []


def test_tokens_that_a_model_does_not_have(forward: CountingForward) -> None:
    drafts = kind(forward, n_vocab=5)
    assert propose(drafts, drafts.drafter(), [1, 2]).tokens[:2] == [3, 4]
    assert all(token < 5 for token in propose(drafts, drafts.drafter(), [1, 2], most=9).tokens)
    assert propose(drafts, drafts.drafter(), [1, N_VOCAB]) == Proposal([], [])
    assert propose(drafts, drafts.drafter(), [1, N_VOCAB - 1]).tokens != []


def test_long_histories_are_read_in_batches_and_steps(
    forward: CountingForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "_CATCH_UP", 10)
    drafts = kind(forward)
    drafter = drafts.drafter()
    history = [i % N_VOCAB for i in range(25)]
    assert [propose(drafts, drafter, history, (), 1).tokens for _ in range(3)] == [[], [], [5]]
    assert [len(batch) for batch in forward.batches] == [10, 10, 5]


def test_the_seconds_of_a_token_are_measured(forward: CountingForward) -> None:
    drafts = kind(forward)
    propose(drafts, drafts.drafter(), [1], most=1)
    assert drafts.seconds(1) == drafts.seconds(0) == 0.25 and drafts.seconds(2) == 0.125
    forward.seconds = 1.0
    propose(drafts, drafts.drafter(), [1], most=1)
    assert drafts.seconds(1) == pytest.approx(0.9 * 0.25 + 0.1 * 1.0)


def test_the_sequence_drafted_longest_ago_makes_room(forward: CountingForward) -> None:
    drafts = kind(forward)
    first, second, third = (drafts.drafter() for _ in range(3))
    history = [i % N_VOCAB for i in range(1, 39)]
    for drafter in (first, second, first):
        assert propose(drafts, drafter, history, most=2).tokens == [19, 0]
    assert propose(drafts, third, history, most=2).tokens == [19, 0]
    assert second.handle is None and first.handle is not None and third.handle is not None
    assert propose(drafts, third, [1] * 101, most=1) == Proposal([], []) and first.handle is None


def test_a_sequence_continues_in_the_memory_of_an_earlier_one(forward: CountingForward) -> None:
    drafts = kind(forward)
    first, second = drafts.drafter(), drafts.drafter()
    history = [i % N_VOCAB for i in range(1, 39)]
    propose(drafts, first, history, most=1)
    first.end(history, 3)
    forward.batches.clear()
    assert propose(drafts, second, [*history[:36], 3], most=1).tokens == [4]
    assert forward.batches == [[3]] and first.handle is None and len(forward.handles) == 1


def test_first_guesses_lie_between_the_bounds_of_a_mark() -> None:
    drafts = ModelKind(cast(Any, SimpleNamespace(n_vocab=5)), 9, ends=frozenset())
    bounds = [0.0, *model_module._BINS, 1.0]
    for mark, (low, high) in enumerate(itertools.pairwise(bounds)):
        assert mark_of(low) == mark and drafts.first_guess(mark) == (low + high) / 2
    assert drafts.first_guess(ANY) == model_module._FIRST_GUESS and drafts._n_vocab == 5


def test_now_and_then_a_worthless_draft_is_tried() -> None:
    drafter = ModelDrafter(cast(Any, None))
    found = [drafter.pass_over() for _ in range(2 * model_module._ASK_AGAIN)]
    assert [i + 1 for i, asked in enumerate(found) if asked] == [model_module._ASK_AGAIN, 2 * model_module._ASK_AGAIN]


@pytest.mark.parametrize(
    ("least", "limits", "most", "drafted", "next_token"),
    [
        (0.0, {}, 4, [4], 4),
        (0.89, {}, 4, [4], 4),
        (0.91, {}, 4, [], None),
        (0.0, {"least": 0.39}, 4, [4], 4),
        (0.0, {"least": 0.4}, 4, [], None),
        (0.0, {}, 1, [4], None),
        (0.0, {"end": 4}, 4, [4], None),
    ],
)
def test_tokens_of_heads_end_where_they_are_not_worth_it(
    forward: CountingForward,
    least: float,
    limits: dict[str, Any],
    most: int,
    drafted: list[int],
    next_token: int | None,
) -> None:
    head = cast(Any, SimpleNamespace(hidden_widths=(8,), first=False, tokens=None))
    drafts = HeadKind(
        cast(Any, forward), N_VOCAB, head, name="head", least=least, ends=frozenset([limits.get("end", 99)])
    )
    query = DraftQuery(drafts.drafter(), [3], [], most, GUESS, 0, limits.get("least", 0.0), 0.0, 0.5)
    row = forward.start(np.array([3]), [], np.array([0])).result()[0]
    proposal, confidence = Proposal([], []), [9.0, 0.5]
    assert drafts._add(query, row, proposal, confidence, 1, lambda mark: 0.8) == next_token
    assert proposal == Proposal(drafted, [mark_of(0.9)] * len(drafted)) and confidence == [9.0, 0.4]


def test_the_time_of_drafting_counts_for_the_next_batch(
    forward: CountingForward, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[Any, ...]] = []
    manager = DraftManager([kind(forward)])
    monkeypatch.setattr(manager.cost, "note", lambda *given: noted.append(given))
    state = manager.follow(PendingDraft(), GUESS)
    request = DraftRequest(state, np.array([1, 2], np.int32), 2, 3, 0)
    (draft,) = manager.propose([request], 1)
    assert draft is not None and draft.tokens == [3, 4, 5] and state.ahead.tokens == draft.tokens
    assert manager.takes_long and manager.features_width == 0
    for seconds in (0.75, 0.0):  # three tokens
        manager.note(1, 4, 0.5, 2, 7.0)
        assert noted.pop() == (1, 4, 0.5, 2, 7.0, seconds)
    assert manager.counts[0][1:] == (1, 3, 0)
    media = manager.follow(PendingDraft(), GUESS, media=True)
    assert manager.propose([DraftRequest(media, np.array([1], np.int32), 1, 3, 0)], 1) == [None]


def test_results_are_learned_by_mark_and_position(forward: CountingForward, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate of any token of a model's drafts is learned, too."""
    manager = DraftManager([kind(forward)])
    state = manager.follow(PendingDraft(), GUESS)
    noted: list[tuple[int, bool]] = []
    monkeypatch.setattr(AcceptanceRates, "note", lambda self, *given: noted.append(given))
    draft = Draft(0, [7, 8, 9], [4, 5, 6])
    state.ahead.add(draft)
    assert [state.ahead.verify(token) for token in (7, 8, 1)] == [True, True, False]
    manager.learn(state)
    assert noted == [(4, True), (ANY, True), (5, True), (ANY, True), (6, False), (ANY, False)]
    assert manager.accepted_at[:4] == [1, 1, 0, 0] and manager.counts[0].n_accepted == 2 and not state.ahead.judged


def test_nothing_is_drafted_while_it_does_not_pay(forward: CountingForward, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = DraftManager([kind(forward)])
    monkeypatch.setattr(manager.cost, "drafts", lambda n_generating: n_generating < 3)
    request = DraftRequest(manager.follow(PendingDraft(), GUESS), np.array([1, 2], np.int32), 2, 3, 0)
    assert manager.propose([request], 3) == [None] and not forward.batches
    (draft,) = manager.propose([request], 2)
    assert draft is not None and draft.tokens == [3, 4, 5]


def test_confidence_is_that_of_the_least_likely_draft(forward: CountingForward) -> None:
    state = DraftManager([kind(forward)]).follow(PendingDraft(), GUESS)
    assert state.confidence() == 1.0
    sure = state.chances[0].of(mark_of(0.99))
    unsure = state.chances[0].of(mark_of(0.1))
    state.ahead.add(Draft(0, [7, 8], [mark_of(0.99)] * 2))
    assert state.confidence() == pytest.approx(sure**2)
    state.ahead.add(Draft(0, [9], [mark_of(0.1)]))
    assert state.confidence() == pytest.approx(sure**2 * unsure)
    assert state.ahead.verify(7)
    assert state.confidence() == pytest.approx(sure * unsure)
