"""Chats with models that have windows or states.

A turn evaluates only its new tokens, whatever the template changes at the end of earlier turns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import chosen

from llamado.engine.cache.prompt_cache import CellReader, PromptStore, ReadRate
from llamado.engine.cache.snapshots import NEAR, Snapshots, drop, points, thin_out
from llamado.engine.engine import Engine
from llamado.engine.errors import SlotFileError
from llamado.engine.options import EngineOptions

from .fake import FakeForward, FakeTokenizer, ask
from .test_memory_kinds import KINDS, Layers, Plain, new, req, tokens

USER, END, ASSISTANT, THINK = 93, 94, 95, 96
PAYS = ReadRate.pays
CONTROL = np.array([USER, END, ASSISTANT], np.int32)


class Chat:
    """A conversation in a chat template; with `thinks`, the template drops the reasoning of earlier turns."""

    def __init__(self, seed: int, *, thinks: bool, head: int = 60) -> None:
        self._thinks = thinks
        self._rng = np.random.default_rng(seed)
        self.said = [*tokens(0, head), END]
        self.last: list[int] = []

    def prompt(self) -> list[int]:
        text = tokens(int(self._rng.integers(1000)), int(self._rng.integers(20, 90)))
        return [*self.said, USER, *(t % 90 + 1 for t in text), END, ASSISTANT, THINK, THINK]

    def answered(self, prompt: list[int], answer: list[int]) -> None:
        self.last = prompt + answer
        self.said = [*(prompt[:-2] if self._thinks else prompt), *answer[len(answer) // 2 * self._thinks :], END]


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture(autouse=True)
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)
    monkeypatch.setattr(ReadRate, "pays", lambda self, n_bytes, n, pace: True)


@pytest.fixture(scope="module", params=chosen(KINDS, ("states", "hybrid")))
def layers(request: pytest.FixtureRequest) -> Layers:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def plain(layers: Layers) -> Iterator[Plain]:
    found = Plain(layers)
    yield found
    found.close()


def engine_of(forward: FakeForward, **options: Any) -> Engine:
    tokenizer = FakeTokenizer(eog=())
    tokenizer.control = CONTROL
    return Engine(forward, tokenizer, EngineOptions(**{"n_slots": 2, "cache_ram": -1, "n_ctx": 4096, **options}))


@pytest.mark.slow
def test_chat_evaluates_only_new_tokens(layers: Layers, plain: Plain) -> None:
    """Twenty turns next to a second chat: each turn evaluates only its new tokens and a few before them."""
    with closing(engine_of(new(layers, n_cells=8192, n_sequences=2))) as engine:
        chats = [Chat(1, thinks=True), Chat(2, thinks=False)]
        for turn in range(20):
            for chat in chats[: 2 if turn < 6 else 1]:
                prompt = chat.prompt()
                result = ask(engine, req(prompt, 12))
                if turn % 5 == 0:
                    assert result.tokens == plain(prompt, 12)
                if chat.last:
                    assert result.n_cached > shared(prompt, chat.last) - NEAR, (turn, len(prompt))
                before = chat.said
                chat.answered(prompt, result.tokens)
                if turn == 5:
                    other = [*before, USER, 7, 8, 9, END, ASSISTANT, THINK, THINK]
                    result = ask(engine, req(other, 12))
                    assert result.tokens == plain(other, 12)
                    assert result.n_cached > shared(other, chat.last) - NEAR, "the last message is edited"
        edited = chats[0].said[:700]
        assert len(chats[0].said) > 1000
        result = ask(engine, req(edited, 5))
        assert result.tokens == plain(edited, 5) and result.n_cached > 500, "an older message is edited"


def test_checkpoint_positions_of_a_prompt() -> None:
    text = list(range(1, 41))
    chat = np.array([*text, END, USER, *text, END, ASSISTANT, 5, 6], np.int32)
    assert points(chat, CONTROL, 0) == [41, 82], "start and end of the last message"
    assert points(chat, CONTROL, 30) == [30, 41, 60, 82]
    assert points(np.array(text, np.int32), CONTROL, 0) == [39] == points(np.array(text), np.empty(0, np.int32), 0)
    assert points(np.array([7], np.int32), CONTROL, 8) == []


def test_least_useful_checkpoints_are_dropped_first() -> None:
    kept = [100, 105, 200, 300, 301, 302]
    assert thin_out(kept, 9) == kept
    assert [drop(kept) for _ in range(5)] == [105, 100, 200, 300, 301] and kept == [302]


def test_dropping_cells_drops_their_checkpoints(layers: Layers) -> None:
    """After devices changed, checkpoints from the former ones would give other bits."""
    engine = engine_of(new(layers, n_cells=8192, n_sequences=2))
    try:
        chat = Chat(1, thinks=True)
        for _ in range(2):
            prompt = chat.prompt()
            chat.answered(prompt, ask(engine, req(prompt, 12)).tokens)
        cache, slots = engine._sequence_cache, engine._sequence_cache.slots
        assert cache.store is not None and cache.store.reserved and any(slot.snapshots.tails for slot in slots)
        cache.forget()
        assert not cache.store.reserved and not any(slot.snapshots.tails for slot in slots)
    finally:
        engine.close()


def test_checkpoints_use_at_most_half_of_the_memory() -> None:
    store = PromptStore(1000, 1, 64)
    store.put(np.arange(150, dtype=np.int32), lambda start, n: np.zeros(n, np.uint8))
    assert store.nbytes == 750
    one, other = (Snapshots(3, store.reserve, store.release) for _ in range(2))
    for n in (20, 60, 100, 101, 140):
        assert one.lacks(n) == (n != 101)
        if one.lacks(n):
            assert one.make_room(120)
            one.put(n, np.zeros(120, np.uint8))
    assert sorted(one.tails) == [60, 100, 140] and store.reserved == 360 and not store.nbytes
    assert not other.make_room(200), "those of the other slot are in use"
    one.cut(100)
    assert other.make_room(200) and sorted(one.tails) == [60, 100] and store.reserved == 240


def test_sequences_get_only_the_memory_that_checkpoints_leave() -> None:
    store = PromptStore(1000, 1, 64)
    assert store.reserve(400)
    for n, n_bytes in ((150, 0), (100, 500)):  # 150 tokens would take 750 bytes
        assert store.put(np.arange(n, dtype=np.int32), lambda start, n: np.zeros(n, np.uint8)) == (n_bytes > 0)
        assert store.nbytes == n_bytes


@pytest.mark.slow
@pytest.mark.parametrize("most", [0, 4])
def test_few_checkpoints_do_not_change_answers(layers: Layers, plain: Plain, most: int) -> None:
    """With few or no checkpoints more tokens are evaluated, and answers are the same."""
    with closing(
        engine_of(new(layers, n_cells=8192, n_sequences=2), ctx_checkpoints=most, checkpoint_min_step=100, n_slots=1)
    ) as engine:
        chat = Chat(3, thinks=True)
        for _ in range(6):
            prompt = chat.prompt()
            chat.answered(prompt, ask(engine, req(prompt, 6)).tokens)
        for n in (500, 300, 120, 61):
            edited = [*chat.said[:n], 7, 8]
            result = ask(engine, req(edited, 5))
            assert result.tokens == plain(edited, 5) and (result.n_cached > 100) <= (n > 120 or most > 0)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_stored_sequences_have_at_most_as_many_checkpoints(most: int) -> None:
    forward = new(KINDS["states"], n_cells=8192, n_sequences=1)
    with closing(engine_of(forward, ctx_checkpoints=most, checkpoint_min_step=100, n_slots=1)) as engine:
        chat = Chat(3, thinks=True)
        for _ in range(2):
            prompt = chat.prompt()
            chat.answered(prompt, ask(engine, req(prompt, 6)).tokens)
        ask(engine, req([1, 2, 3], 1))  # replaces the sequence of the only slot
        store = engine._sequence_cache.store
        assert store is not None and [len(stored.tails) for stored in store.all()] == [max(most, 1)]


@pytest.mark.slow
def test_checkpoint_at_the_end_of_a_common_prefix(layers: Layers, plain: Plain) -> None:
    """The end of their common prefix is unknown at first; the third prompt finds a checkpoint there."""
    with closing(engine_of(new(layers, n_cells=8192, n_sequences=2))) as engine:
        head, found = tokens(9, 300), []
        for i in range(4):
            prompt = [*head, i + 1, *tokens(i, 100)]
            result = ask(engine, req(prompt, 5))
            assert result.tokens == plain(prompt, 5)
            found.append(result.n_cached)
        assert found[0] == 0 and min(found[2:]) >= 300 - NEAR


def test_slow_reads_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReadRate, "pays", PAYS)
    rate = ReadRate()
    assert rate.pays(1 << 30, 1, 1e9), "no rate is known yet"
    rate.note(1_000_000, 1.0)
    assert rate.pays(500_000, 100, 200.0) and not rate.pays(510_000, 100, 200.0)
    assert [rate.pays(510_000, 100, 200.0) for _ in range(17)].count(True) == 2, "now and then it is tried again"


@pytest.mark.slow
def test_slot_files_contain_checkpoints(layers: Layers, plain: Plain, tmp_path: Path) -> None:
    """The restored slot can rewind to the same checkpoints as the saved one."""
    one, other = (engine_of(new(layers, n_cells=8192, n_sequences=2)) for _ in range(2))
    try:
        chat = Chat(4, thinks=True)
        for _ in range(4):
            prompt = chat.prompt()
            before = chat.said
            chat.answered(prompt, ask(one, req(prompt, 20, id_slot=0)).tokens)
        one.save_slot(0, tmp_path / "a").result(60)
        other.restore_slot(1, tmp_path / "a").result(60)
        for asked in (chat.prompt(), [*before, USER, 7, 8, END, ASSISTANT, THINK, THINK]):
            result = ask(other, req(asked, 9, id_slot=1))
            assert result.tokens == plain(asked, 9) and result.n_cached > shared(asked, chat.last) - NEAR
        whole = (tmp_path / "a").read_bytes()
        assert whole[8] == 4
        for at in range(140, len(whole), 151):
            (tmp_path / "a").write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(SlotFileError):
                other.restore_slot(0, tmp_path / "a").result(60)
    finally:
        one.close()
        other.close()
