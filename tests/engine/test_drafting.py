"""Draft tokens: proposed from earlier text, kept only if they are right, and invisible in answers."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tiny_models import make_llama

from llamado.devices.device import DeviceError
from llamado.engine.drafts.acceptance import AcceptanceRates
from llamado.engine.drafts.contract import Draft, Drafter, DraftKind, Proposal
from llamado.engine.drafts.cost import Cost, DraftWindow
from llamado.engine.drafts.drafts import DraftManager, _worth
from llamado.engine.drafts.load import drafts_for
from llamado.engine.drafts.model import DraftQuery, ModelKind
from llamado.engine.drafts.ngram_cache import NgramCache, read_lookup_cache
from llamado.engine.drafts.pending_draft import PendingDraft
from llamado.engine.drafts.suffix import Suffix, SuffixAutomaton
from llamado.engine.engine import Engine
from llamado.engine.errors import EngineError
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions, ModelSource
from llamado.engine.request import Counters, GenerationParams, Request
from llamado.engine.sampling.chain import Sampler, SamplerSetup
from llamado.engine.sampling.params import Sampling

from .fake import ALL, FakeForward, FakeTokenizer, ask, send, settled

MOST = 16


def proposed(kind: DraftKind | Drafter, history: list[int], most: int = MOST, ahead: Sequence[int] = ()) -> list[int]:
    drafter = kind.drafter() if isinstance(kind, DraftKind) else kind
    tokens, marks = drafter.propose(history, ahead, most)
    assert len(tokens) == len(marks) <= most
    return tokens


# -- the sources -------------------------------------------------------------------------------------------------------


def test_tokens_after_the_longest_matching_suffix_are_proposed() -> None:
    assert proposed(Suffix(), [1, 2, 3, 4, 5, 6, 1, 2, 3])[:3] == [4, 5, 6]
    assert proposed(Suffix(), [7, 1, 2, 9, 8, 1, 2, 3, 5, 1, 2])[:2] == [3, 5]  # the latest occurrence wins
    assert proposed(Suffix(), [7, 1, 2, 9, 8, 1, 2, 3, 5, 7, 1, 2])[:1] == [9]  # and a longer match beats a later one
    assert proposed(Suffix(), [1, 2, 3, 4]) == []
    assert proposed(Suffix(), [5]) == [] and proposed(Suffix(), [5, 6, 5], most=0) == []
    assert proposed(Suffix(), [1, 2, 3, 1, 2, 3, 1]) == ([2, 3, 1] * 6)[:MOST]  # a loop repeats


def test_pending_drafts_count_as_history() -> None:
    history = [random.Random(3).randrange(5) for _ in range(300)]
    kind = NgramCache()
    drafter = kind.drafter()
    for n in range(20, 290):
        first = proposed(drafter, history[:n], 1)
        assert proposed(drafter, history[:n], 1, first) == proposed(kind, [*history[:n], *first], 1) or not first
    assert proposed(Suffix(), [9, 1, 2, 3, 4, 5, 1, 2], 4, [3]) == [4, 5, 1, 2]
    assert proposed(Suffix(), [9, 1, 2, 3, 4, 5, 1, 2], 2, [7, 9]) == [1, 2]
    assert proposed(Suffix(), [1, 1, 1], 4, [1, 1, 1, 1]) == [1, 1, 1, 1]


def test_suffix_automaton_equals_a_search() -> None:
    for seed in range(4):
        random_ = random.Random(seed)
        text = [random_.randrange(2 + seed) for _ in range(90)]
        automaton = SuffixAutomaton()
        for end, token in enumerate(text, 1):
            automaton.append(token)
            state, n = automaton.repeated()
            ends = {k: [at for at in range(k, end) if text[at - k : at] == text[end - k : end]] for k in range(1, end)}
            longest = max((k for k, at in ends.items() if at), default=0)
            assert n == longest
            if n:
                assert automaton.last_end[state] in ends[n]
                assert longest > 24 or automaton.last_end[state] == max(ends[n])


def test_a_growing_sequence_is_indexed_incrementally() -> None:
    history = [random.Random(3).randrange(5) for _ in range(200)]
    grown = Suffix().drafter()
    for n in range(1, 200):
        assert proposed(grown, history[:n]) == proposed(Suffix(), history[:n])
    grown.forget()
    assert proposed(grown, [1, 2, 3, 1, 2])[:1] == [3]


def test_outputs_of_other_requests_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Suffix()
    first = kind.drafter()
    first.end([9, 8, 1, 2, 3, 4, 5, 6], 2)
    kind.drafter().end([7, 7, 7], 3)  # it generated nothing
    second = kind.drafter()
    assert proposed(second, [5, 9, 1, 2, 3]) == [4, 5, 6]  # but not the start of the next answer
    assert proposed(Suffix(shared=False), [5, 9, 1, 2, 3]) == []
    kind.drafter().end([0, 1, 2, 3, 11, 12], 1)
    assert proposed(second, [5, 9, 1, 2, 3]) == [11, 12]
    monkeypatch.setattr("llamado.engine.drafts.suffix._TOKENS", 8)
    for n in range(100, 160, 3):
        kind.drafter().end([n, n + 1, n + 2], 0)
    assert proposed(second, [5, 9, 1, 2, 3]) == []  # the oldest was evicted
    assert proposed(second, [5, 9, 1, 2, 3, 157, 158]) == [159]


def test_ngram_names_select_the_suffix_drafter_once(tmp_path: Path) -> None:
    names = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
    path = tmp_path / "cache"
    np.array([7, 8, -1, -1, 1, 9, 3], "<i4").tofile(path)

    def sources(*kinds: str, **options: str) -> list[str]:
        drafts = drafts_for(EngineOptions(drafts=DraftOptions(kinds=kinds, **options)), None, 3)
        return [] if drafts is None else [kind.name for kind in drafts.kinds]

    assert all(sources(name) == ["suffix"] for name in names) and sources(*names) == ["suffix"]
    assert sources("ngram-cache", lookup_static=str(path)) == ["ngram-cache"]
    assert sources("ngram-mod", "ngram-cache", lookup_dynamic=str(path)) == ["suffix", "ngram-cache"]
    assert sources("suffix", lookup_static=str(path)) == ["suffix"] and sources() == []


def test_ngram_cache_proposes_from_history_and_files(tmp_path: Path) -> None:
    assert proposed(NgramCache(), [1, 2, 3, 4, 5, 1, 2, 3]) == [4, 5, 1, 2, 3, 4, 5, 1]
    assert proposed(NgramCache(), [1, 2, 3, 9, 2, 5, 2]) == []  # 2 is followed by both equally often

    def entry(key: Sequence[int], followed: dict[int, int]) -> list[int]:
        return [*key, *[-1] * (4 - len(key)), len(followed), *(n for item in followed.items() for n in item)]

    path = tmp_path / "cache"
    np.array([*entry([7, 8], {9: 3, 4: 1}), *entry([8, 9], {5: 1})], "<i4").tofile(path)
    assert read_lookup_cache(path) == {(7, 8): {9: 3, 4: 1}, (8, 9): {5: 1}}
    assert proposed(NgramCache(static=str(path)), [1, 7, 8]) == [9]
    assert proposed(NgramCache(dynamic=str(path)), [1, 7, 8]) == [9]
    for followed, draft in (({9: 2, 4: 1}, [9]), ({9: 2}, [])):  # after two tokens, three occurrences of any are enough
        np.array(entry([7, 8], followed), "<i4").tofile(path)
        assert proposed(NgramCache(dynamic=str(path)), [1, 7, 8]) == draft
    for data in (b"abc" * 11, np.array([7, 8, -1, -1, 0], "<i4").tobytes()):
        path.write_bytes(data)
        with pytest.raises(EngineError, match="not a lookup cache"):
            NgramCache(str(path))
    with pytest.raises(EngineError, match="cannot read"):
        NgramCache(str(tmp_path / "nothing"))


# -- what is worth its time --------------------------------------------------------------------------------------------


def test_acceptance_rates_are_learned_by_mark() -> None:
    common = AcceptanceRates(lambda mark: 0.5)
    one = AcceptanceRates(common)
    for _ in range(50):
        one.note(1, True)
        one.note(0, False)
    assert one.of(1) > 0.9 > 0.1 > one.of(0) and one.of(2) == 0.5
    assert common.of(1) > 0.9 and AcceptanceRates(common).of(1) > 0.9  # another sequence starts with the common rates
    assert list(one.all_accepted([2, 2], 0.5)) == [0.25, 0.125]


def test_rates_of_a_sequence_follow_its_text_faster_than_the_common_ones() -> None:
    common = AcceptanceRates(lambda mark: 0.5)
    one = AcceptanceRates(common)
    for n, right in ((200, True), (20, False)):
        for _ in range(n):
            one.note(1, right)
    assert one.of(1) < 0.5 < 0.8 < common.of(1)


def test_draft_tokens_are_verified_in_order() -> None:
    ahead = PendingDraft()
    first, second = Draft(0, [1, 2], [0, 0]), Draft(1, [3], [0])
    ahead.add(first)
    ahead.add(second)
    assert ahead.tokens == [1, 2, 3] and ahead.drafts == [first, second]
    assert ahead.verify(1) and ahead.verify(2) and ahead.epoch == 0 and ahead.tokens == [3]
    assert not ahead.verify(4) and ahead.epoch == 1 and not ahead
    assert not ahead.verify(3) and ahead.epoch == 1
    assert (ahead.n_drafted, ahead.n_accepted, first.accepted) == (3, 2, 2)
    assert ahead.judged == [(first, 0, True), (first, 1, True), (second, 0, False)]


@pytest.mark.parametrize("tokens", [[1, 2, 3], [1, 2, 9], [1, 9], [9], [1, 2]])
def test_accepted_tokens_are_counted_by_position(tokens: list[int]) -> None:
    drafts = DraftManager([Suffix()])
    followed = drafts.follow(PendingDraft(), cast(Any, None))
    followed.ahead.add(Draft(0, [1, 2, 3], [0, 0, 0]))
    for token in tokens:
        followed.ahead.verify(token)
    drafts.learn(followed)
    right = [int(i < len(tokens) and tokens[i] == i + 1) for i in range(3)]
    assert drafts.accepted_at[:4] == [*right, 0] and drafts.counts[0].n_accepted == sum(right)
    assert not followed.ahead.judged


batch_clock = [0.0]


def run_batches(cost: Cost, n_generating: int, rate: Callable[[bool], float], fixed: float, each: float) -> list[bool]:
    """Run 2,000 batches of `n_generating` sequences; `rate` gives tokens per second with and without drafts."""
    now, owed, drafted = batch_clock[-1], 0.0, []
    for i in range(2000):
        drafting = cost.drafts(n_generating)
        drafted.append(drafting)
        n = 1 + i % 5 if drafting else 1
        seconds = fixed + each * n
        now += seconds
        owed += rate(drafting) * seconds
        cost.note(n_generating, n, seconds, int(owed), now)
        owed -= int(owed)
    batch_clock.append(now)
    return drafted


def test_a_token_is_worth_more_if_batches_wait_for_the_network() -> None:
    waiting, working = Cost(), Cost()
    for _ in range(3):
        run_batches(waiting, 1, lambda drafting: 100.0 if drafting else 20.0, 0.05, 0.0002)
        run_batches(working, 1, lambda drafting: 1000.0 if drafting else 500.0, 0.001, 0.004)
    assert min(waiting.least_gain(1) for _ in range(5)) < 0.1
    assert min(waiting.least_gain(1, 0.05) for _ in range(5)) > 0.1  # slower drafting lowers the value of a token
    assert max(working.least_gain(1) for _ in range(5)) > 0.5
    if not working.drafts(1):  # during a trial
        run_batches(working, 1, lambda drafting: 1000.0, 0.001, 0.004)
    gains = [working.least_gain(1) for _ in range(100)]
    assert working.drafts(1)
    assert 1 <= sum(gain < 0.5 for gain in gains) < 10  # it is tried again now and then


def test_drafting_time_lowers_the_value_of_a_token() -> None:
    free, dear = Cost(), Cost()
    for i in range(20):
        for cost, drafting in ((free, 0.0), (dear, 0.05)):
            cost.note(1, 1 + i % 3, 0.05 + 0.005 * (i % 3), 1, 0.0, drafting)
    # The cost of a token is the same, but the time of a batch and its draft could have yielded twice as many tokens.
    assert dear.least_gain(1) == pytest.approx(free.least_gain(1) * 0.055 / 0.105, rel=0.02)


def test_draft_windows_are_as_short_as_links_allow() -> None:
    windows = DraftWindow()
    assert windows.length == 2
    for _ in range(20):
        windows.note(0.05)
    assert windows.length == 1
    for _ in range(20):
        windows.note(0.08)  # they wait for each other
    assert windows.length > 6
    for _ in range(200):
        windows.note(0.08)  # links have become slower
    assert windows.length == 1


def test_value_of_a_draft_is_gain_minus_cost() -> None:
    assert _worth([0.9, 0.5, 0.4, 0.8], 0.4) == (2, pytest.approx(0.6))
    assert _worth([0.3, 0.9], 0.4) == (0, 0.0)


def test_drafting_stops_for_one_sequence_if_it_is_slower() -> None:
    """ScriptedDrafter losses are not tried again."""
    cost, now = Cost(), 0.0
    for i in range(1000):
        assert cost.drafts(1)
        n = 1 + i % 3
        now += 0.05
        cost.note(1, n, 0.05, n, now)
    drafted = []
    for i in range(1000):  # a loss shows at once
        drafted.append(cost.drafts(1))
        n = 1 + i % 3 if drafted[-1] else 1
        now += 0.05 * n * n
        cost.note(1, n, 0.05 * n * n, 1, now)
    assert sum(drafted[50:]) < 200


def test_drafting_is_used_only_if_it_raises_throughput() -> None:
    cost = Cost()
    busy = run_batches(cost, 8, lambda drafting: 250.0 if drafting else 400.0, 0.01, 0.001)
    idle = run_batches(cost, 1, lambda drafting: 90.0 if drafting else 60.0, 0.01, 0.001)
    assert sum(busy[100:]) < 0.2 * len(busy[100:]) and any(busy[100:])
    assert sum(busy[1000:]) < 0.04 * len(busy[1000:])  # less and less often
    assert sum(idle[100:]) > 0.8 * len(idle[100:])


# -- answers -----------------------------------------------------------------------------------------------------------


class Free(Cost):
    """Makes batches free, so that drafting always pays."""

    def least_gain(self, n_generating: int, seconds: float = 0.0) -> float:
        return 0.0

    def drafts(self, n_generating: int) -> bool:
        return True


def free(*kinds: DraftKind, **options: Any) -> DraftManager:
    drafts = DraftManager(kinds, **options)
    drafts.cost = Free()
    return drafts


class LateForward(FakeForward):
    """Computes a batch when its result is requested.

    A batch is done once `together` batches were started, itself included.
    """

    depth = together = 4

    def start(self, *args: Any, **options: Any) -> Future[Any]:
        found: Future[Any] = Future()
        done = super().start(*args, **options)
        late = self.late = getattr(self, "late", [])
        late.append(found)

        def result(timeout: float | None = None) -> Any:
            del late[: late.index(found) + 1]  # earlier results that were not requested are stale
            self.n_asked = getattr(self, "n_asked", 0) + 1
            return done.result()

        found.result = result  # type: ignore[method-assign]
        number = len(self.sizes)
        found.done = lambda: len(self.sizes) - number >= self.together - 1  # type: ignore[method-assign]
        self.most_late = max(getattr(self, "most_late", 0), len(late))
        return found


KINDS: dict[str, Callable[[], DraftKind]] = {
    "suffix": Suffix,
    "ngram-cache": NgramCache,
    "draft-simple": lambda: ModelKind(FakeForward(1024, n_vocab=3, max_batch=16), 3, ends=frozenset({0})),
}


def run_requests(drafts: DraftManager | None, depth: int, temperature: float) -> tuple[list[Any], Counters, int]:
    """A small vocabulary makes many drafts right by chance; cells of wrong drafts would change all later tokens."""
    random_ = random.Random(5)
    requests = [
        Request(
            prompt=[random_.randrange(1, 3) for _ in range(random_.randrange(3, 30))],
            params=GenerationParams(
                n_predict=random_.randrange(10, 60),
                n_probs=2,
                sampling=Sampling(seed=i, ignore_eos=True, temperature=temperature),
            ),
        )
        for i in range(6)
    ]
    forward = (FakeForward if depth == 1 else LateForward)(1024, n_vocab=3, max_batch=24)
    with closing(Engine(forward, FakeTokenizer(), EngineOptions(n_slots=3, n_ctx=256), drafts=drafts)) as engine:
        results = [client.result for client in [send(engine, request) for request in requests]]
        results += [ask(engine, request) for request in requests[:2]]
        return results, settled(engine).counters, getattr(forward, "most_late", 0)


@functools.cache
def plain(temperature: float) -> list[Any]:
    return run_requests(None, 1, temperature)[0]


@pytest.mark.slow
@pytest.mark.parametrize("names", [*KINDS, "suffix,ngram-cache,draft-simple"])
def test_answers_are_the_same_with_and_without_drafts(names: str) -> None:
    for depth, temperature in ((1, 1.0), (4, 0.0), (4, 1.0)):
        without = plain(temperature)
        with_, counters, most_late = run_requests(
            free(*(KINDS[name]() for name in names.split(","))), depth, temperature
        )
        for name in ("tokens", "probs", "content", "seed", "n_predicted", "n_tokens_cached", "stop_type"):
            assert [getattr(r, name) for r in with_] == [getattr(r, name) for r in without], name
        assert counters.n_accepted > 0.02 * counters.tokens_predicted_total  # several tokens came from one batch
        assert [kind.name for kind in counters.drafts] == names.split(",")
        assert sum(kind.n_accepted for kind in counters.drafts) == counters.n_accepted
        assert depth == 1 or most_late > 1


class ScriptedDrafter(DraftKind, Drafter):
    """Drafts the right answer, with wrong tokens where `wrong` returns True."""

    name = "known"

    def __init__(self, answer: list[int], wrong: Callable[[int], bool]) -> None:
        self.answer, self.wrong = answer, wrong

    def drafter(self) -> ScriptedDrafter:
        return self

    def forget(self) -> None:
        pass

    def propose(self, history: Sequence[int], ahead: Sequence[int], most: int) -> Proposal:
        at = len(history) + len(ahead)
        tokens = [token ^ self.wrong(at + i) for i, token in enumerate(self.answer[at : at + most])]
        return Proposal(tokens, [0] * len(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("every", [10**9, 23, 7])
def test_several_draft_windows_are_in_flight(every: int) -> None:
    """If drafts are right, windows follow each other before the first result; a wrong tail is discarded."""
    prompt = [1, 2, 3, 4, 5]
    request = Request(prompt=prompt, params=GenerationParams(n_predict=150, sampling=Sampling(seed=1, ignore_eos=True)))

    def answer_with(drafts: DraftManager | None) -> tuple[list[int], Counters, LateForward]:
        forward = LateForward(1024, max_batch=64, layers=(ALL, ALL))
        with closing(Engine(forward, FakeTokenizer(), EngineOptions(n_slots=2, n_ctx=256), drafts=drafts)) as engine:
            return ask(engine, request).tokens, settled(engine).counters, forward

    tokens, _, without = answer_with(None)
    known = ScriptedDrafter([*prompt, *tokens], lambda at: at % every == every - 1)
    found, counters, forward = answer_with(free(known))
    assert found == tokens
    assert without.most_late == 1 and 4 <= forward.most_late <= 7  # results after a wrong token are not awaited
    assert len(forward.sizes) < (90 if every == 7 else 40) and counters.n_accepted > 110


@pytest.mark.parametrize("depth", [1, 4])
def test_drafting_continues_until_the_first_result(depth: int) -> None:
    """This holds even if no more batches would be in flight; results after a wrong token are not awaited."""
    prompt = [1, 2, 3, 4, 5]
    request = Request(prompt=prompt, params=GenerationParams(n_predict=150, sampling=Sampling(seed=1, ignore_eos=True)))
    forward = LateForward(1024, max_batch=64)
    engine = Engine(forward, FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=256))
    tokens = ask(engine, request).tokens
    engine.close()
    for every, most in ((10**9, 0), (50, 3 * 4)):
        forward = LateForward(1024, max_batch=64)
        forward.depth, forward.together = depth, 4
        known = ScriptedDrafter([*prompt, *tokens], lambda at, every=every: at % every == every - 1)  # type: ignore[misc]
        with closing(
            Engine(forward, FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=256), drafts=free(known, most=2))
        ) as engine:
            assert ask(engine, request).tokens == tokens
        assert forward.most_late == 4 if every > 50 else 4 <= forward.most_late <= 7
        stale = len(forward.sizes) - forward.n_asked - len(forward.late)
        assert (stale > 0) == (most > 0) and stale <= most


@pytest.mark.slow
def test_attention_windows_move_only_past_verified_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that keeps a window of tokens moves it along only past verified tokens."""
    from llamado.models.memory import KeysValues

    request = Request(
        prompt=[1, 2, 3], params=GenerationParams(n_predict=450, sampling=Sampling(seed=1, ignore_eos=True))
    )

    def answer_with(drafts: DraftManager | None) -> list[int]:
        forward = LateForward(1024, max_batch=32, layers=(KeysValues(1, 1, 32), ALL))
        with closing(Engine(forward, FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=1024), drafts=drafts)) as engine:
            return ask(engine, request).tokens

    tokens = answer_with(None)
    for every in (29, 61):
        known = ScriptedDrafter([1, 2, 3, *tokens], lambda at, every=every: at % every == every - 1)  # type: ignore[misc]
        assert answer_with(free(known)) == tokens


def test_a_draft_ends_where_the_answer_ends() -> None:
    """Budget, context and end-of-text limits hold, whatever was drafted beyond them."""
    forward = FakeForward(256, n_vocab=2, max_batch=64)
    with closing(
        Engine(forward, FakeTokenizer(eog=(0,)), EngineOptions(n_slots=1, n_ctx=64), drafts=free(Suffix()))
    ) as engine:
        for n in range(1, 30):
            result = ask(
                engine, Request(prompt=[1, 1, 1], params=GenerationParams(n_predict=n, sampling=Sampling(seed=n)))
            )
            assert len(result.tokens) <= n and 0 not in result.tokens[:-1]
        full = ask(
            engine, Request(prompt=[1] * 20, params=GenerationParams(sampling=Sampling(seed=1, ignore_eos=True)))
        )
        assert full.truncated and len(full.tokens) == 64 - 20


def test_requested_draft_lengths_are_respected() -> None:
    sizes = {}
    for name, options in {"any": {}, "most": {"most": 2}, "least": {"least": 100}}.items():
        forward = FakeForward(512, n_vocab=2, max_batch=64)
        with closing(
            Engine(forward, FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=256), drafts=free(Suffix(), **options))
        ) as engine:
            ask(
                engine,
                Request(
                    prompt=[1, 1, 1], params=GenerationParams(n_predict=100, sampling=Sampling(seed=3, ignore_eos=True))
                ),
            )
        sizes[name] = max(forward.sizes[1:])
    assert sizes["any"] > 3 == sizes["most"] and sizes["least"] == 1


# -- a model that drafts -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_draft_model_equal_to_the_target_is_always_right() -> None:
    """It samples with the same random numbers, in its own memory, while sequences come and go."""
    draft = FakeForward(768, max_batch=32)  # room for few sequences at a time
    kind = ModelKind(draft, 97, ends=frozenset({0}))
    with closing(
        Engine(
            FakeForward(2048, max_batch=32),
            FakeTokenizer(),
            EngineOptions(n_slots=3, n_ctx=256),
            drafts=free(kind, most=6),
        )
    ) as engine:
        for round_ in range(3):
            asked = [
                Request(
                    prompt=[1 + (7 * i + k) % 90 for k in range(20 + 100 * (i % 2))],
                    params=GenerationParams(
                        n_predict=40, sampling=Sampling(seed=i, temperature=round_ / 2, ignore_eos=True)
                    ),
                )
                for i in range(6)
            ]
            results = [client.result for client in [send(engine, request) for request in asked]]
            for result in results:
                assert result.timings.draft_n_accepted == result.timings.draft_n
        assert sum(result.timings.draft_n or 0 for result in results) > 100
        first = len(draft.sizes)
        again = Request(prompt=[*asked[5].prompt, *results[5].tokens, 5], params=GenerationParams(n_predict=4))
        assert (
            ask(engine, again).n_predicted and 0 < sum(draft.sizes[first:]) < 20
        )  # tokens already evaluated are not evaluated again


def test_draft_model_fills_windows_of_limited_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds if windows follow each other; the model is queried again although drafting does not seem to pay."""
    request = Request(
        prompt=[1, 2, 3], params=GenerationParams(n_predict=100, sampling=Sampling(seed=1, ignore_eos=True))
    )
    sizes = {}
    for length in (3, 5):
        forward, draft = LateForward(1024, max_batch=64), FakeForward(1024, max_batch=64)
        drafts = free(ModelKind(draft, 97, ends=frozenset()))
        monkeypatch.setattr(DraftWindow, "length", length)
        with closing(Engine(forward, FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=256), drafts=drafts)) as engine:
            assert len(ask(engine, request).tokens) == 100
        sizes[length] = forward.sizes[2:]
    assert all(max(found) == length for length, found in sizes.items()) and sizes[3].count(3) > 20


@pytest.mark.parametrize(
    ("least", "least_next", "drafted", "wanted"),
    [(0.3, 0.4, 1, 1), (0.3, 0.2, 2, 1), (0.2, 0.2, 2, 2), (0.2, 0.1, 3, 2)],
)
def test_drafted_tokens_are_evaluated_even_if_drafting_stops(
    least: float, least_next: float, drafted: int, wanted: int
) -> None:
    """Half of the tokens are right; the cost of drafting is already spent and must not prevent evaluation."""
    draft = FakeForward(256, max_batch=64)
    kind = ModelKind(draft, 97, ends=frozenset())
    guess = Sampler(Sampling(temperature=0.0), SamplerSetup(97), seed=1)
    ask = DraftQuery(kind.drafter(), [1, 2, 3], [], 8, guess, 3, least, least_next, 1.0)
    (proposal,) = kind.propose([ask], [lambda mark: 0.5])
    assert (len(draft.sizes), len(proposal.tokens)) == (drafted, wanted)


def test_unprofitable_draft_model_is_tried_again() -> None:
    forward, draft = FakeForward(1024, max_batch=64), FakeForward(1024, max_batch=64)
    drafts = free(ModelKind(draft, 97, ends=frozenset()))
    drafts.cost.least_gain = lambda n, seconds=0.0: 2.0  # type: ignore[method-assign]
    with closing(Engine(forward, FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=256), drafts=drafts)) as engine:
        ask(
            engine,
            Request(
                prompt=[1, 2, 3], params=GenerationParams(n_predict=100, sampling=Sampling(seed=1, ignore_eos=True))
            ),
        )
    assert 10 <= len(draft.sizes) <= 14, "the draft model runs now and then although it does not pay"


def test_losing_the_draft_device_fails_no_request() -> None:
    draft = FakeForward(1024, max_batch=32)
    kind = ModelKind(draft, 97, ends=frozenset())
    engine = Engine(FakeForward(1024, max_batch=32), FakeTokenizer(), EngineOptions(n_slots=1), drafts=free(kind))
    request = Request(
        prompt=[1, 2, 3], params=GenerationParams(n_predict=60, sampling=Sampling(seed=1, ignore_eos=True))
    )
    try:
        tokens = ask(engine, request).tokens

        def fail(n: int) -> None:
            if len(draft.sizes) > 30:
                raise DeviceError("it burns")

        draft.sizes.clear()
        draft.before = fail
        assert ask(engine, request).tokens == tokens and kind.lost
        assert ask(engine, request).tokens == tokens
    finally:
        engine.close()


@pytest.mark.full
def test_draft_model_is_loaded_from_its_file(tmp_path: Path) -> None:
    target, small = (
        make_llama(tmp_path / "t.gguf", n_vocab=320),
        make_llama(tmp_path / "s.gguf", n_vocab=320, n_layer=1),
    )
    other = make_llama(tmp_path / "o.gguf", n_vocab=500)
    answers = []
    for path in (None, target, small):
        wanted = DraftOptions(model=None if path is None else ModelSource(spec=str(path)), most=4)
        with LoadedModel.load(target, EngineOptions(n_ctx=512, n_threads=1, drafts=wanted)) as llama:
            if path is not None:
                llama.engine._drafts.cost = Free()  # type: ignore[union-attr]
            found = [
                llama.complete("Hello world", n_predict=24, seed=3, temperature=t, ignore_eos=True) for t in (0.0, 0.9)
            ]
            answers.append([r.tokens for r in found])
            if path == target:
                assert all(r.timings.draft_n == r.timings.draft_n_accepted for r in found)
                assert sum(r.timings.draft_n or 0 for r in found) > 20
    assert answers[0] == answers[1] == answers[2]
    with pytest.raises(EngineError, match="its vocabulary has 500 tokens, the model's 320"):
        LoadedModel.load(target, EngineOptions(n_ctx=512, drafts=DraftOptions(model=ModelSource(spec=str(other)))))
