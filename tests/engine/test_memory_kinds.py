"""The engine with models that remember windows, latent rows or states: the bytes of answers are those of a model that
reads everything anew, whatever is gone back to, copied, kept, saved or lost.
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


@pytest.fixture(params=chosen(KINDS, ("only windows", "hybrid")))
def layers(request: pytest.FixtureRequest) -> Layers:
    return KINDS[request.param]


@pytest.fixture(autouse=True)
def reading_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock decides what these tests see."""
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
    """A forward pass whose windows have no room to spare: rows are lost as soon as they may be."""
    return kind(**{"layers": layers, "n_sequences": N_SLOTS, "max_batch": MAX_BATCH, "slack": 0, **options})


def req(prompt: list[int], n: int = 8, **options: Any) -> Request:
    return Defaults().request(prompt, n_predict=n, temperature=0.0, seed=1, **options)


def tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(1, 97, n).tolist()


class Plain:
    """Answers of a memory that keeps everything and of which nothing is used again."""

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


@pytest.fixture
def plain(layers: Layers) -> Iterator[Plain]:
    found = Plain(layers)
    yield found
    found.close()


def talk(engine: Engine, plain: Plain, rng: random.Random, n_turns: int) -> int:
    """Conversations that grow, are asked again, change somewhere, and come back; how many tokens were not computed."""
    said = [tokens(rng.randrange(1000), rng.randint(5, 120)) for _ in range(3)]
    cached = 0
    for _ in range(n_turns):
        i = rng.randrange(len(said))
        match rng.randrange(6):
            case 0:  # something else from some point on
                said[i] = said[i][: rng.randint(1, len(said[i]))] + tokens(rng.randrange(1000), rng.randint(1, 60))
            case 1:  # it begins like another one
                other = said[rng.randrange(len(said))]
                said[i] = other[: rng.randint(1, len(other))] + tokens(rng.randrange(1000), 9)
            case 2:  # asked again
                pass
            case _:
                said[i] = said[i] + tokens(rng.randrange(1000), rng.randint(1, 40))
        said[i] = said[i][:250]
        n = rng.choice([1, 5, 20])
        result = ask(engine, req(said[i], n))
        assert result.tokens == plain(said[i], n)
        cached += result.n_cached
        if rng.random() < 0.7:
            said[i] = said[i] + result.tokens
    return cached


@pytest.mark.slow
@pytest.mark.parametrize("cache_ram", [0, -1])
def test_conversations(make: Make, plain: Plain, cache_ram: int) -> None:
    engine, _ = make(cache_ram=cache_ram, drafts=DraftManager([Suffix()]))
    assert talk(engine, plain, random.Random(cache_ram), 16) > 100


@pytest.mark.slow
def test_many_at_a_time(make: Make, plain: Plain) -> None:
    engine, _ = make(cache_ram=-1, drafts=DraftManager([Suffix()]))
    rng = random.Random(3)
    head = tokens(1, 90)
    prompts = [head[: rng.randint(1, 90)] + tokens(i, rng.randint(1, 120)) for i in range(6)]
    clients = [send(engine, req(prompt, 10)) for prompt in prompts * 2]
    for client, prompt in zip(clients, prompts * 2, strict=True):
        assert client.result.tokens == plain(prompt, 10)


def test_a_prompt_asked_again_is_not_read_again(make: Make, plain: Plain) -> None:
    """Its end was put aside, or the state there: going back costs a token, however long the answer was."""
    engine, forward = make(n_slots=1)
    prompt = tokens(5, 200)
    for n in (120, 3):
        forward.sizes.clear()
        result = ask(engine, req(prompt, n))
        assert result.tokens == plain(prompt, n)
    assert result.n_cached == 199 and sum(forward.sizes) < 10


def test_a_place_that_is_gone_is_computed_again(make: Make, plain: Plain) -> None:
    """In the middle of what was read long ago: from the last point that can be gone back to, or from the beginning."""
    engine, _ = make(n_slots=1)
    prompt = tokens(6, 300)
    ask(engine, req(prompt, 100))
    other = prompt[:150] + tokens(7, 20)
    result = ask(engine, req(other))
    assert result.tokens == plain(other) and result.n_cached < 150


@pytest.mark.slow
def test_a_conversation_that_was_pushed_out_comes_back_from_memory(make: Make, plain: Plain) -> None:
    engine, _ = make(n_slots=1, cache_ram=-1)
    prompt = tokens(8, 250)
    first = ask(engine, req(prompt, 60)).tokens
    for n in (1, 2):
        ask(engine, req(tokens(8 + n, 100), 5))
        longer = [*prompt, *first, *tokens(20, n)]
        result = ask(engine, req(longer))
        assert result.tokens == plain(longer) and result.n_cached >= 309
    ask(engine, req(tokens(30, 100), 5))
    result = ask(engine, req(prompt, 60))  # not the end of what is kept, but a point that was marked
    assert result.tokens == first and result.n_cached == 249


def test_an_end_that_is_copied_from_another_slot(make: Make, plain: Plain) -> None:
    engine, _ = make()
    prompt = tokens(9, 200)
    ask(engine, req(prompt, 40, id_slot=0))
    again = prompt[:-1] + tokens(10, 30)
    result = ask(engine, req(again, id_slot=1))
    assert result.tokens == plain(again) and result.n_cached == 199


@pytest.mark.slow
@pytest.mark.parametrize("n", [3, 39, 40, 41, 200])
def test_slot_files(make: Make, plain: Plain, tmp_path: Path, n: int) -> None:
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
def test_a_slot_that_is_being_restored_serves_no_other(make: Make, plain: Plain, tmp_path: Path) -> None:
    """Half of its tokens are there: whoever begins alike must not copy what lacks the rest."""
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


def test_files_of_another_kind_of_memory(make: Make, layers: Layers, tmp_path: Path) -> None:
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


def test_a_damaged_tail(make: Make, tmp_path: Path) -> None:
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
def test_a_full_context_is_shifted(make: Make, layers: Layers) -> None:
    for keep in (4, 90):
        answers = []
        for whole in (False, True):
            engine, _ = make(new(layers, whole=whole), n_slots=1, n_ctx=128, context_shift=True)
            answers.append(ask(engine, req(tokens(keep, 100), 200, n_keep=keep)).tokens)
        assert answers[0] == answers[1] and len(answers[0]) == 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_devices_die(layers: Layers, plain: Plain, make: Make, seed: int) -> None:
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


def together(engine: Engine, prompts: list[list[int]], n: int) -> list[list[int]]:
    clients = [send(engine, req(prompt, n)) for prompt in prompts]
    return [client.result.tokens for client in clients]


SHARED = len(SYSTEM) // BLOCK * BLOCK
"""Cells that sequences with the same beginning have together: all its whole blocks."""


@pytest.mark.slow
def test_what_sequences_begin_with_is_there_once(make: Make, plain: Plain, layers: Layers) -> None:
    engine, _ = make()
    prompts = [SYSTEM + tokens(i, 20) for i in range(N_SLOTS)]
    assert together(engine, prompts, 12) == [plain(prompt, 12) for prompt in prompts]
    until(lambda: engine.snapshot().kv_cells_shared == SHARED)
    held = sum(slot.n_prompt_tokens for slot in engine.snapshot().slots)
    assert engine.snapshot().kv_cells_used == held - (N_SLOTS - 1) * SHARED
    for turn in range(3):  # each goes on by itself
        prompts = [prompt + plain(prompt, 12) + tokens(10 * turn + i, 9) for i, prompt in enumerate(prompts)]
        assert together(engine, prompts, 12) == [plain(prompt, 12) for prompt in prompts]
        assert engine.snapshot().kv_cells_shared == SHARED


@pytest.mark.slow
def test_who_goes_back_into_what_is_shared_leaves_it_to_the_others(make: Make, plain: Plain) -> None:
    engine, _ = make(cache_ram=0)
    prompts = [SYSTEM + tokens(i, 20) for i in range(N_SLOTS)]
    together(engine, prompts, 4)
    for n in (130, 97, 31, 1):
        other = SYSTEM[:n] + tokens(n, 40)
        assert ask(engine, req(other, 9, id_slot=1)).tokens == plain(other, 9)
        for slot in (0, 2):
            assert ask(engine, req(prompts[slot], 4, id_slot=slot)).tokens == plain(prompts[slot], 4)


@pytest.mark.slow
def test_a_full_memory_keeps_what_is_shared_for_the_others(make: Make, plain: Plain, layers: Layers) -> None:
    """Cells for one sequence and a half: who is pushed out gives up what it alone has."""
    engine, forward = make(new(layers, n_cells=512), n_ctx=400, cache_ram=0)
    prompts = [SYSTEM + tokens(i, 60) for i in range(6)]
    for _ in range(2):
        assert together(engine, prompts, 40) == [plain(prompt, 40) for prompt in prompts]
    assert sum(forward.sizes) < 2 * 6 * (len(SYSTEM) + 100), "the beginning is not read by each"


def test_slot_files_of_sequences_that_share(make: Make, plain: Plain, tmp_path: Path) -> None:
    engine, _ = make(cache_ram=0)
    prompts = [SYSTEM + tokens(i, 20) for i in range(2)]
    said = together(engine, prompts, 8)
    number = next(slot.id for slot in engine.snapshot().slots if slot.request and slot.request.prompt == prompts[1])
    saved = engine.save_slot(number, tmp_path / "slot").result(60)
    assert saved.n_tokens == len(prompts[1]) + 7
    engine.erase_slot(number).result(60)
    assert engine.snapshot().kv_cells_shared == 0
    engine.restore_slot(2, tmp_path / "slot").result(60)
    for slot, (prompt, answer) in zip((2, 1 - number), reversed([*zip(prompts, said, strict=True)]), strict=True):
        longer = [*prompt, *answer, 5]
        result = ask(engine, req(longer, 8, id_slot=slot))
        assert result.tokens == plain(longer) and result.n_cached >= len(prompt) + 7


@pytest.mark.slow
def test_a_worker_is_lost_while_sequences_share(make: Make, plain: Plain, layers: Layers) -> None:
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
