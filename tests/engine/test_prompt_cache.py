"""The prompt cache in memory: more conversations than slots, without evaluating any prompt twice."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_llama

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.device import DeviceLost
from llamado.engine.cache import prompt_cache
from llamado.engine.cache.prompt_cache import CellReader, PromptStore, ReadCost, StoredSequence
from llamado.engine.engine import Engine
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.scheduler import outage
from llamado.engine.scheduler.prefix import MIN_SHARED, MIN_STORE
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model

from .fake import FakeForward, FakeTokenizer, ask, new_engine, req, send, settled
from .test_restore import TWO, Cluster

Make = Callable[..., tuple[Engine, FakeForward]]


PAYS = CellReader.pays


@pytest.fixture(autouse=True)
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reading always pay, so that no test depends on the clock."""
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)


@pytest.fixture
def make(exits: ExitStack) -> Make:
    def build(n_cells: int = 4096, **kw: Any) -> tuple[Engine, FakeForward]:
        forward = FakeForward(n_cells)
        engine = exits.enter_context(
            closing(new_engine(forward, FakeTokenizer(), **{"n_slots": 2, "cache_ram": 1, **kw}))
        )
        return engine, forward

    return build


def prompt(seed: int, n: int = 150, head: int = 0) -> list[int]:
    """Return random tokens after `head` tokens that all prompts share."""
    rng = random.Random(seed)
    return [1 + i % 96 for i in range(head)] + [rng.randrange(1, 97) for _ in range(n - head)]


def talk(engine: Engine, n_conversations: int, n_turns: int) -> list[list[tuple[list[int], int]]]:
    """Run conversations in turns; return the tokens of each answer, and how much of its prompt was cached."""
    chats = [prompt(seed) for seed in range(n_conversations)]
    found: list[list[tuple[list[int], int]]] = [[] for _ in chats]
    for turn in range(n_turns):
        for i, tokens in enumerate(chats):
            result = ask(engine, req(tokens))
            found[i].append((result.tokens, result.n_cached))
            chats[i] = tokens + result.tokens + prompt(100 * turn + i, 20)
    return found


@pytest.mark.parametrize("idle_slots", [None, "keep", "clear"])
def test_cache_idle_slots(make: Make, idle_slots: Any) -> None:
    """--cache-idle-slots: new requests find the cells of idle slots free, and their sequences in the cache."""
    engine, _ = make(n_slots=3, cache_idle_slots=idle_slots)
    plain, _ = make(n_slots=3)
    chats = [prompt(seed) for seed in range(2)]
    first = [ask(engine, req(tokens)) for tokens in chats]
    held = [slot.n_prompt_tokens for slot in engine.snapshot().slots]
    assert held.count(0) == (2 if idle_slots == "clear" else 1)
    assert len(engine._sequence_cache.store or ()) == (0 if idle_slots is None else 1)
    again = [tokens + answer.tokens for tokens, answer in zip(chats, first, strict=True)]
    results = [ask(engine, req(tokens)) for tokens in again]
    assert [result.n_cached >= 150 for result in results] == [True, True]
    assert [result.tokens for result in results] == [ask(plain, req(tokens)).tokens for tokens in again]


@pytest.mark.slow
def test_more_conversations_than_slots(make: Make) -> None:
    """The second turn of each conversation reuses its cells, with the same bits as an engine without a cache."""
    engine, forward = make()
    plain, all_of_it = make(cache_ram=0)
    found, expected = talk(engine, 6, 3), talk(plain, 6, 3)
    assert [[tokens for tokens, _ in turns] for turns in found] == [[tokens for tokens, _ in t] for t in expected]
    for turns in found:
        assert [cached for _, cached in turns] == [0, 157, 185], "all but the last token of the answer"
    assert all(cached == 0 for turns in expected for _, cached in turns)
    assert sum(forward.sizes) < sum(all_of_it.sizes) / 2
    snapshot = settled(engine)
    assert snapshot.counters.prompt_tokens_cached_total == 6 * (157 + 185)
    assert snapshot.counters.prompt_tokens_total == 6 * (150 + (178 - 157) + (206 - 185))
    assert snapshot.n_stored_prompts == 6, "two lack their last turn, which slots hold"
    assert snapshot.stored_prompt_bytes == 12 * (4 * 213 + 2 * 185), "8 bytes of cells and 4 of a token"
    assert settled(plain).n_stored_prompts == 0 and not all_of_it.reads


def test_only_new_cells_are_read(make: Make) -> None:
    engine, forward = make(n_slots=1)
    talk(engine, 2, 2)
    forward.reads.clear()
    ask(engine, req(prompt(77)))
    assert sum(n for _, n in forward.reads) == 28, "stored cells of the conversation are reused"


def test_short_sequences_are_not_stored(make: Make) -> None:
    engine, _ = make(n_slots=1)
    for n in (MIN_STORE - 1, MIN_STORE):
        ask(engine, req(prompt(n, n), 0))
        ask(engine, req(prompt(99), 0))
    assert ask(engine, req([*prompt(MIN_STORE, MIN_STORE), 5])).n_cached == MIN_STORE
    assert ask(engine, req([*prompt(MIN_STORE - 1, MIN_STORE - 1), 5])).n_cached == 0


def test_part_of_a_stored_sequence_is_reused(make: Make) -> None:
    """Part of a stored sequence is used if it is longer than the prefixes in slots."""
    engine, forward = make(n_slots=1)
    ask(engine, req(prompt(1, 150, head=100)))
    ask(engine, req(prompt(2)))
    result = ask(engine, req(prompt(3, 150, head=100)))
    assert result.n_cached == 100 and forward.writes
    forward.writes.clear()
    result = ask(engine, req(prompt(7, 150, head=100)))
    assert result.n_cached == 100, "the slot has it"
    assert not forward.writes
    few = MIN_SHARED - 1
    ask(engine, req(prompt(5)))
    assert ask(engine, req(prompt(6, 150, head=few))).n_cached == 0, "too short for a read"


def test_cache_prompt_false_reads_no_stored_sequence(make: Make) -> None:
    engine, forward = make(n_slots=1)
    expected = ask(engine, req(prompt(1))).tokens
    ask(engine, req(prompt(2)))
    result = ask(engine, req(prompt(1), cache_prompt=False))
    assert (result.tokens, result.n_cached) == (expected, 0) and not forward.writes


@pytest.mark.slow
def test_evicted_cells_come_back_from_the_cache(make: Make) -> None:
    """An idle slot, and a younger request that has to wait, get their cells back from the cache."""
    engine, forward = make(512, n_slots=2, n_ctx=512)
    expected = ask(engine, req(prompt(1, 200), 40, id_slot=0)).tokens
    big = ask(engine, req(prompt(2, 400), 4, id_slot=1))
    assert big.n_cached == 0 and settled(engine).slots[0].n_prompt_tokens == 0
    assert ask(engine, req(prompt(1, 200) + expected, 4)).n_cached == 239

    engine, forward = make(512, n_slots=2, n_ctx=512)
    alone = [ask(make(cache_ram=0)[0], req(prompt(i, 150), 250)).tokens for i in (1, 2)]
    clients = [send(engine, req(prompt(i, 150), 250)) for i in (1, 2)]
    assert [client.result.tokens for client in clients] == alone
    assert forward.writes, "the younger one was evicted, and came back"
    assert sum(forward.sizes) < 2 * 400 + 40


def test_cache_never_exceeds_its_limit(make: Make) -> None:
    engine, _ = make(n_slots=1)
    assert engine._sequence_cache.store is not None
    engine._sequence_cache.store._limit = 12 * 1000
    for i in range(20):
        ask(engine, req(prompt(i), 0))
        assert settled(engine).stored_prompt_bytes <= 12 * 1000
    assert settled(engine).n_stored_prompts == 1000 // 150
    assert ask(engine, req([*prompt(14), 1], 1)).n_cached == 150
    assert ask(engine, req([*prompt(9), 1], 1)).n_cached == 0
    ask(engine, req(prompt(99, 1001), 0))
    before = settled(engine)
    ask(engine, req(prompt(100), 0))
    assert settled(engine).n_stored_prompts == before.n_stored_prompts, "too large for the cache"


# -- the store by itself ---------------------------------------------------------------------------------------------


def cells_of(tokens: np.ndarray[Any, Any], start: int, n: int) -> np.ndarray[Any, Any]:
    """Return bytes that depend on all tokens up to a cell: three per cell."""
    sums = np.cumsum(tokens * np.arange(1, tokens.size + 1), dtype=np.int64)[start : start + n]
    return (sums[:, None] + np.arange(3)).astype(np.uint8).reshape(-1)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), max_size=25),
    st.one_of(st.none(), st.integers(0, 600)),
    st.integers(1, 8),
)
def test_store_finds_the_longest_prefix_in_any_order(sequences: list[list[int]], limit: int | None, piece: int) -> None:
    store = PromptStore(limit, 3, piece)
    kept: list[np.ndarray[Any, Any]] = []
    for sequence in sequences:
        tokens = np.array(sequence, np.int32)
        longest = max((next((i for i, (a, b) in enumerate(zip(k, sequence, strict=False)) if a != b),
                            min(len(k), len(sequence))) for k in kept), default=0)  # fmt: skip
        found = store.find(tokens, 1)
        assert (found[1] if found else 0) == longest
        if found:
            got = np.zeros(3 * longest, np.uint8)
            first = longest // 2
            for at, n, data in found[0].pieces(first, longest):
                got[3 * at : 3 * (at + n)] = data[: 3 * n]
            assert np.array_equal(got[3 * first :], cells_of(tokens, first, longest - first))
        if store.holds(tokens):
            assert any(np.array_equal(k[: tokens.size], tokens) for k in kept)
            continue
        fits = limit is None or tokens.size * 7 <= limit
        assert store.put(tokens, lambda start, n, tokens=tokens: cells_of(tokens, start, n)) == fits  # type: ignore[misc]
        kept = [prompt_cache.tokens for prompt_cache in store._kept]
        assert any(np.array_equal(k, tokens) for k in kept) == fits
        assert store.nbytes == sum(7 * k.size for k in kept) and (limit is None or store.nbytes <= limit)
        assert store.n_tokens == sum(k.size for k in kept)
        for a in kept:
            assert not any(b is not a and np.array_equal(b[: a.size], a) for b in kept), "one is a prefix of another"


def test_read_rate_estimates_the_cost() -> None:
    cost = ReadCost(8, 0.018, 32, 0.042)  # 10 ms per call and 1 ms per cell
    assert cost.seconds(100, 256) == pytest.approx(0.110) and cost.seconds(300, 100) == pytest.approx(0.330)
    for _ in range(50):
        cost.note(100, 0.220)
    assert cost.seconds(100, 256) == pytest.approx(0.220)
    noisy = ReadCost(8, 0.020, 32, 0.010)
    assert noisy.seconds(100, 256) == pytest.approx(0.020), "more took less"


def test_failed_read_changes_nothing() -> None:
    store = PromptStore(None, 3, 4)
    short = np.arange(10, dtype=np.int32)
    store.put(short, lambda start, n: cells_of(short, start, n))
    before = store.nbytes

    def fail(start: int, n: int) -> Any:
        raise DeviceLost("RPC1", "gone")

    with pytest.raises(DeviceLost):
        store.put(np.arange(20, dtype=np.int32), fail)
    assert store.nbytes == before and store.holds(short)


@pytest.mark.parametrize("limit", [7 * 20, 7 * 12, 1])
def test_sequence_larger_than_memory_goes_to_disk(limit: int) -> None:
    dropped: list[StoredSequence] = []
    store = PromptStore(limit, 3, 4, dropped=dropped.append)
    tokens = np.arange(30, dtype=np.int32)
    for n in (10, 25):
        assert store.put(tokens[:n], lambda start, k: cells_of(tokens, start, k))
        assert store.nbytes <= limit and store.nbytes == sum(one.nbytes for one in store._kept)
    large = dropped[-1]
    assert np.array_equal(large.tokens, tokens[:25])
    assert np.array_equal(np.concatenate([data for _, data in large.cells]), cells_of(tokens, 0, 25))
    assert not PromptStore(limit, 3, 4).put(tokens, lambda start, n: cells_of(tokens, start, n))


# -- real forward passes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return make_llama(path, n_embd=256, n_ff=512, n_layer=4, n_vocab=300, wtype="Q4_K")


TOKENIZER = FakeTokenizer(dict.fromkeys(range(300), b"x"))


def two_turns(engine: Engine, n: int) -> list[Any]:
    """Return the probabilities of all tokens in a second turn, for `n` conversations, and the cached counts."""
    chats = []
    for seed in range(n):
        chats.append(prompt(seed, 80))
        chats[-1] += ask(engine, req(chats[-1], 6)).tokens
    found = [ask(engine, req([*tokens, 7], 6, n_probs=300)) for tokens in chats]
    return [[result.probs for result in found], [result.n_cached for result in found]]


@pytest.mark.slow
@pytest.mark.parametrize("divided", [False, True])
def test_real_models_reuse_cells_bit_for_bit(model: Path, jit: Jit, divided: bool) -> None:
    with GGUFFile.open(model) as file:
        alone = ModelRunner(file, load_model(file), [CpuDevice(1, jit=jit)], RunnerOptions(n_cells=1024, max_batch=64))
        engine = Engine(alone, TOKENIZER, EngineOptions(n_slots=1))
        expected, cached = two_turns(engine, 3)
        assert max(cached[:-1]) == 0
        engine.close()
        cluster = Cluster(model, TWO, jit, n_cells=1024, max_batch=64) if divided else None
        engine = Engine(
            cluster.forward if cluster is not None else alone, TOKENIZER, EngineOptions(n_slots=1, cache_ram=-1)
        )
        found, cached = two_turns(engine, 3)
        assert found == expected and cached == [85] * 3
        engine.close()
        alone.close()
    if cluster is not None:
        cluster.forward.close()
        cluster.file.close()


def test_cells_that_are_slow_to_read_are_evaluated_again(make: Make) -> None:
    """Reading over a slow link does not pay; it is tried again now and then."""
    engine, forward = make(n_slots=1)
    read, slow = forward.read_rows, 10.0

    def dear(spans: Any) -> Any:
        cells = read(spans)
        clock.append(clock[-1] + slow * spans[0].n)
        return cells

    clock = [0.0]
    forward.read_rows = dear  # type: ignore[method-assign]
    real = prompt_cache.time.perf_counter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CellReader, "pays", PAYS)
        patch.setattr(prompt_cache.time, "perf_counter", lambda: real() + clock[-1])
        talk(engine, 2, 2)
        assert [n for _, n in forward.reads] == [prompt_cache._PROBE_FEW] and not forward.writes
        assert settled(engine).n_stored_prompts == 0
        slow = 0.0
        for i in range(20):
            ask(engine, req(prompt(i), 1))
        assert settled(engine).n_stored_prompts > 0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["read", "write"])
def test_losing_a_worker_while_cells_move(model: Path, jit: Jit, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The worker fails while cells are stored or read back; only time is lost."""
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.01)
    cluster = Cluster(model, TWO, jit, n_cells=1024, max_batch=64)
    plain = Engine(cluster.forward, TOKENIZER, EngineOptions(n_slots=1))
    expected, _ = two_turns(plain, 3)
    plain.close()
    engine = Engine(cluster.forward, TOKENIZER, EngineOptions(n_slots=1, cache_ram=1))
    place = "_store" if what == "read" else "recall"
    work = getattr(engine._sequence_cache, place)
    n = 0

    def die(*args: Any) -> None:
        nonlocal n
        n += 1
        if n in (3, 5):
            device = cluster.device(2)
            device.before = lambda now: device.die() if now == what else None
        work(*args)

    monkeypatch.setattr(engine._sequence_cache, place, die)
    try:
        found, _ = two_turns(engine, 3)
        assert found == expected
        assert cluster.asked, "a device was lost"
    finally:
        engine.close()
        cluster.forward.close()
        cluster.file.close()


def test_snapshot_lists_stored_sequences_and_their_last_use() -> None:
    store = PromptStore(None, 3, 4)
    assert store.entries == ()
    for first in (1, 100):
        store.put(np.arange(first, first + 60, dtype=np.int32), lambda start, n: np.zeros(3 * n, np.uint8))
    late, early = store.entries
    assert (late.n_tokens, late.begins[:2], len(late.begins)) == (60, (100, 101), 48) and early.begins[0] == 1
    assert late.n_bytes + early.n_bytes == store.nbytes and store.entries is store.entries
    assert store.find(np.arange(1, 40, dtype=np.int32), 4) is not None
    assert [one.begins[0] for one in store.entries] == [1, 100] and store.entries[0].used >= late.used
    for first in range(200, 320):
        store.put(np.arange(first * 7, first * 7 + 60, dtype=np.int32), lambda start, n: np.zeros(3 * n, np.uint8))
    assert len(store.entries) == 100 and store.entries[0].begins[0] == 319 * 7, (
        "more are not looked through at each step"
    )
    store.clear()
    assert store.entries == ()
