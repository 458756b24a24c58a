"""The engine with models that have windows, latent rows or states.

Answers are byte for byte those of a full evaluation, whatever is rewound, copied, kept, saved or lost.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import chosen
from waiting import until

from llamado.engine.cache.prompt_cache import CellReader
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.errors import SlotFileError
from llamado.engine.request import Defaults, Request
from llamado.models.memory import KeysValues, LayerMemory
from llamado.models.memory.parts import BLOCK

from .fake import ALL, STATE, FakeForward, FakeTokenizer, ask, new_engine, send
from .test_recovery import FragileForward

WINDOW = 40
SLIDING = KeysValues(1, 1, WINDOW)
KINDS: dict[str, tuple[LayerMemory, ...]] = {
    "windows": (SLIDING, SLIDING, ALL, SLIDING),
    "only windows": (SLIDING,),
    "states": (STATE, STATE),
    "hybrid": (STATE, ALL, SLIDING, STATE),
}
N_SLOTS, MAX_BATCH = 3, 24
Layers = tuple[LayerMemory, ...]
Make = Callable[..., tuple[Engine, FakeForward]]


@pytest.fixture(scope="module", params=chosen(KINDS, ("only windows", "hybrid")))
def layers(request: pytest.FixtureRequest) -> Layers:
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make reading always pay, so that tests do not depend on the clock."""
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)


@pytest.fixture
def make(layers: Layers, exits: ExitStack) -> Make:
    def build(forward: FakeForward | None = None, **options: Any) -> tuple[Engine, FakeForward]:
        forward = forward or new(layers)
        engine = exits.enter_context(
            closing(new_engine(forward, FakeTokenizer(eog=()), **{"n_slots": N_SLOTS, **options}))
        )
        return engine, forward

    return build


def new(layers: Layers, kind: type[FakeForward] = FakeForward, **options: Any) -> FakeForward:
    """A forward pass whose windows have no spare rows: rows are lost as early as possible."""
    return kind(**{"layers": layers, "n_sequences": N_SLOTS, "max_batch": MAX_BATCH, "slack": 0, **options})


def req(prompt: list[int], n: int = 8, **options: Any) -> Request:
    return Defaults().request(prompt, n_predict=n, temperature=0.0, seed=1, **options)


def tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 97, n).tolist()


class Plain:
    """Answers of a memory that keeps every row, without any reuse."""

    def __init__(self, layers: Layers) -> None:
        self._engine = Engine(new(layers, whole=True), FakeTokenizer(eog=()))
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, prompt: list[int], n: int = 8) -> list[int]:
        key = tuple(prompt), n
        if key not in self._known:
            self._known[key] = ask(self._engine, req(prompt, n, cache_prompt=False)).tokens
        return self._known[key]

    def close(self) -> None:
        self._engine.close()


@pytest.fixture(scope="module")
def plain(layers: Layers) -> Iterator[Plain]:
    found = Plain(layers)
    yield found
    found.close()


def talk(engine: Engine, plain: Plain, rng: random.Random, n_turns: int) -> int:
    """Run conversations that grow, repeat, change and come back; return the number of cached tokens."""
    chats = [tokens(rng.randrange(1000), rng.randint(5, 120)) for _ in range(3)]
    cached = 0
    for _ in range(n_turns):
        i = rng.randrange(len(chats))
        match rng.randrange(6):
            case 0:  # different tokens from some point on
                chats[i] = chats[i][: rng.randint(1, len(chats[i]))] + tokens(rng.randrange(1000), rng.randint(1, 60))
            case 1:  # it starts like another one
                other = chats[rng.randrange(len(chats))]
                chats[i] = other[: rng.randint(1, len(other))] + tokens(rng.randrange(1000), 9)
            case 2:  # repeated
                pass
            case _:
                chats[i] = chats[i] + tokens(rng.randrange(1000), rng.randint(1, 40))
        chats[i] = chats[i][:250]
        n = rng.choice([1, 5, 20])
        result = ask(engine, req(chats[i], n))
        assert result.tokens == plain(chats[i], n)
        cached += result.n_cached
        if rng.random() < 0.7:
            chats[i] = chats[i] + result.tokens
    return cached


@pytest.mark.slow
@pytest.mark.parametrize("cache_ram", [0, -1])
def test_conversations_equal_full_evaluation(make: Make, plain: Plain, cache_ram: int) -> None:
    engine, _ = make(cache_ram=cache_ram, drafts=DraftManager([Suffix()]))
    assert talk(engine, plain, random.Random(cache_ram), 16) > 100


@pytest.mark.slow
def test_concurrent_requests_equal_full_evaluation(make: Make, plain: Plain) -> None:
    engine, _ = make(cache_ram=-1, drafts=DraftManager([Suffix()]))
    rng = random.Random(3)
    head = tokens(1, 90)
    prompts = [head[: rng.randint(1, 90)] + tokens(i, rng.randint(1, 120)) for i in range(6)]
    clients = [send(engine, req(prompt, 10)) for prompt in prompts * 2]
    for client, prompt in zip(clients, prompts * 2, strict=True):
        assert client.result.tokens == plain(prompt, 10)


def test_repeated_prompt_is_not_evaluated_again(make: Make, plain: Plain) -> None:
    """The end of the prompt, or the state there, was kept: rewinding costs one token, however long the answer was."""
    engine, forward = make(n_slots=1)
    prompt = tokens(5, 200)
    for n in (120, 3):
        forward.sizes.clear()
        result = ask(engine, req(prompt, n))
        assert result.tokens == plain(prompt, n)
    assert result.n_cached == 199 and sum(forward.sizes) < 10


def test_lost_positions_are_evaluated_again(make: Make, plain: Plain) -> None:
    """A position in the middle is evaluated from the last checkpoint before it, or from the beginning."""
    engine, _ = make(n_slots=1)
    prompt = tokens(6, 300)
    ask(engine, req(prompt, 100))
    other = prompt[:150] + tokens(7, 20)
    result = ask(engine, req(other))
    assert result.tokens == plain(other) and result.n_cached < 150


@pytest.mark.slow
def test_evicted_conversation_comes_back_from_the_prompt_cache(make: Make, plain: Plain) -> None:
    engine, _ = make(n_slots=1, cache_ram=-1)
    prompt = tokens(8, 250)
    first = ask(engine, req(prompt, 60)).tokens
    for n in (1, 2):
        ask(engine, req(tokens(8 + n, 100), 5))
        longer = [*prompt, *first, *tokens(20, n)]
        result = ask(engine, req(longer))
        assert result.tokens == plain(longer) and result.n_cached >= 309
    ask(engine, req(tokens(30, 100), 5))
    result = ask(engine, req(prompt, 60))  # this is not the end of the sequence but a checkpoint
    assert result.tokens == first and result.n_cached == 249


def test_end_is_copied_from_another_slot(make: Make, plain: Plain) -> None:
    engine, _ = make()
    prompt = tokens(9, 200)
    ask(engine, req(prompt, 40, id_slot=0))
    again = prompt[:-1] + tokens(10, 30)
    result = ask(engine, req(again, id_slot=1))
    assert result.tokens == plain(again) and result.n_cached == 199


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 39, 40, 41, 200])
def test_slot_files_restore_sequences(make: Make, plain: Plain, tmp_path: Path, n: int) -> None:
    one, _ = make()
    prompt = tokens(n, n)
    answer = ask(one, req(prompt, 20, id_slot=0)).tokens
    saved = one.save_slot(0, tmp_path / "a").result(60)
    two, _ = make()
    ask(two, req(tokens(1, 120), 5, id_slot=2))
    assert two.restore_slot(2, tmp_path / "a").result(60).n_tokens == saved.n_tokens == n + 19
    longer = [*prompt, *answer, *tokens(2, 5)]
    result = ask(two, req(longer))
    assert result.tokens == plain(longer) and result.n_cached == n + 19


@pytest.mark.slow
def test_slot_being_restored_is_not_shared(make: Make, plain: Plain, tmp_path: Path) -> None:
    """Half of its tokens are restored; a request with the same prefix must not copy the incomplete slot."""
    engine, forward = make()
    prompt = tokens(11, 600)
    ask(engine, req(prompt, 1, id_slot=0))
    engine.save_slot(0, tmp_path / "a").result(60)
    engine.erase_slot(0).result(60)
    inside = threading.Event()
    write = forward.write_rows

    def slow(spans: Any, pieces: Any) -> None:
        write(spans, pieces)
        inside.set()

    forward.write_rows = slow  # type: ignore[method-assign]
    restored = engine.restore_slot(0, tmp_path / "a")
    assert inside.wait(60)
    for n in (200, 256, 300, 520):
        other = [*prompt[:n], 5, 6]
        assert ask(engine, req(other, id_slot=1)).tokens == plain(other)
    restored.result(60)


def test_slot_files_of_another_memory_kind_are_refused(make: Make, layers: Layers, tmp_path: Path) -> None:
    engine, _ = make()
    ask(engine, req(tokens(1, 100), 1, id_slot=0))
    engine.save_slot(0, tmp_path / "a").result(60)
    for others in ((ALL,) * len(layers), (KeysValues(1, 1, 30),) * len(layers)):
        other, _ = make(new(others))
        before = ask(other, req(tokens(2, 50), 1, id_slot=0))
        with pytest.raises(SlotFileError, match="another kind of memory"):
            other.restore_slot(0, tmp_path / "a").result(60)
        other.save_slot(0, tmp_path / "b").result(60)
        with pytest.raises(SlotFileError, match="another kind of memory"):
            engine.restore_slot(0, tmp_path / "b").result(60)
        assert before.tokens


def test_damaged_slot_file_is_refused(make: Make, tmp_path: Path) -> None:
    engine, _ = make()
    ask(engine, req(tokens(1, 100), 1, id_slot=0))
    path = tmp_path / "a"
    engine.save_slot(0, path).result(60)
    whole = path.read_bytes()
    for at in range(70, len(whole), 97):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(SlotFileError):
            engine.restore_slot(1, path).result(60)


@pytest.mark.slow
def test_context_shift_equals_full_evaluation(make: Make, layers: Layers) -> None:
    for keep in (4, 90):
        answers = []
        for whole in (False, True):
            engine, _ = make(new(layers, whole=whole), n_slots=1, n_ctx=128, context_shift=True)
            answers.append(ask(engine, req(tokens(keep, 100), 130, n_keep=keep)).tokens)
        assert answers[0] == answers[1] and len(answers[0]) == 130


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_losing_devices_does_not_change_answers(layers: Layers, plain: Plain, make: Make, seed: int) -> None:
    forward = new(layers, FragileForward, seed=seed, depth=3)
    assert isinstance(forward, FragileForward)
    engine, _ = make(forward, cache_ram=-1)
    rng = random.Random(seed)
    head = tokens(1, 60)
    prompts = [head[: rng.randint(1, 60)] + tokens(i, rng.randint(1, 120)) for i in range(6)]
    clients = [send(engine, req(prompt, 15)) for prompt in prompts]
    for n in (60, 150):
        until(lambda n=n: sum(forward.sizes) > n or all(c.over.is_set() for c in clients))  # type: ignore[misc]
        forward.die()
        until(lambda: forward.recovery.lost() is None)
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.result.tokens == plain(prompt, 15)
    forward.end()


SYSTEM = tokens(77, 150)


def answers_of(engine: Engine, prompts: list[list[int]], n: int) -> list[list[int]]:
    clients = [send(engine, req(prompt, n)) for prompt in prompts]
    return [client.result.tokens for client in clients]


SHARED = len(SYSTEM) // BLOCK * BLOCK
"""Cells that sequences with the same prefix share: all its whole blocks."""


@pytest.mark.slow
def test_shared_prefix_is_stored_once(make: Make, plain: Plain, layers: Layers) -> None:
    engine, _ = make()
    prompts = [SYSTEM + tokens(i, 20) for i in range(N_SLOTS)]
    assert answers_of(engine, prompts, 12) == [plain(prompt, 12) for prompt in prompts]
    until(lambda: engine.snapshot().kv_cells_shared == SHARED)
    held = sum(slot.n_prompt_tokens for slot in engine.snapshot().slots)
    assert engine.snapshot().kv_cells_used == held - (N_SLOTS - 1) * SHARED
    for turn in range(3):  # each continues separately
        prompts = [prompt + plain(prompt, 12) + tokens(10 * turn + i, 9) for i, prompt in enumerate(prompts)]
        assert answers_of(engine, prompts, 12) == [plain(prompt, 12) for prompt in prompts]
        assert engine.snapshot().kv_cells_shared == SHARED


@pytest.mark.slow
def test_rewinding_into_a_shared_prefix_keeps_it_for_others(make: Make, plain: Plain) -> None:
    engine, _ = make(cache_ram=0)
    prompts = [SYSTEM + tokens(i, 20) for i in range(N_SLOTS)]
    answers_of(engine, prompts, 4)
    for n in (130, 97, 31, 1):
        other = SYSTEM[:n] + tokens(n, 40)
        assert ask(engine, req(other, 9, id_slot=1)).tokens == plain(other, 9)
        for slot in (0, 2):
            assert ask(engine, req(prompts[slot], 4, id_slot=slot)).tokens == plain(prompts[slot], 4)


@pytest.mark.slow
def test_full_memory_keeps_the_shared_prefix(make: Make, plain: Plain, layers: Layers) -> None:
    """There are cells for one and a half sequences: an evicted sequence gives up only its own cells."""
    engine, forward = make(new(layers, n_cells=512), n_ctx=400, cache_ram=0)
    prompts = [SYSTEM + tokens(i, 60) for i in range(6)]
    for _ in range(2):
        assert answers_of(engine, prompts, 40) == [plain(prompt, 40) for prompt in prompts]
    assert sum(forward.sizes) < 2 * 6 * (len(SYSTEM) + 100), "the prefix is evaluated once"


def test_slot_files_of_sequences_with_a_shared_prefix(make: Make, plain: Plain, tmp_path: Path) -> None:
    engine, _ = make(cache_ram=0)
    prompts = [SYSTEM + tokens(i, 20) for i in range(2)]
    chats = answers_of(engine, prompts, 8)
    number = next(slot.id for slot in engine.snapshot().slots if slot.request and slot.request.prompt == prompts[1])
    saved = engine.save_slot(number, tmp_path / "slot").result(60)
    assert saved.n_tokens == len(prompts[1]) + 7
    engine.erase_slot(number).result(60)
    assert engine.snapshot().kv_cells_shared == 0
    engine.restore_slot(2, tmp_path / "slot").result(60)
    for slot, (prompt, answer) in zip((2, 1 - number), reversed([*zip(prompts, chats, strict=True)]), strict=True):
        longer = [*prompt, *answer, 5]
        result = ask(engine, req(longer, 8, id_slot=slot))
        assert result.tokens == plain(longer) and result.n_cached >= len(prompt) + 7


@pytest.mark.slow
def test_losing_a_worker_while_a_prefix_is_shared(make: Make, plain: Plain, layers: Layers) -> None:
    forward = new(layers, FragileForward, seed=3, depth=3)
    assert isinstance(forward, FragileForward)
    engine, _ = make(forward)
    prompts = [SYSTEM + tokens(i, 20) for i in range(N_SLOTS)]

    def halfway() -> None:
        forward.hold = len(forward.sizes) > 30

    forward.in_start = halfway
    clients = [send(engine, req(prompt, 60)) for prompt in prompts]
    until(lambda: forward.hold)
    shared, ended = forward.memory.n_shared, any(client.over.is_set() for client in clients)
    forward.in_start = lambda: None
    forward.die()
    forward.go_on()
    assert shared == SHARED and not ended
    until(lambda: forward.recovery.lost() is None)
    for client, prompt in zip(clients, prompts, strict=True):
        assert client.result.tokens == plain(prompt, 60)
    until(lambda: engine.snapshot().kv_cells_shared == SHARED, "they do not share again")
    forward.end()
