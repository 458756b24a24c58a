"""Draft tokens for models with recurrent states: wrong drafts are rolled back, and answers stay identical."""

from __future__ import annotations

import functools
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tiers import first_of
from tiny import TINY, make
from waiting import until

from llamado.engine.drafts.contract import DraftKind
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.model import ModelKind
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.request import Counters, GenerationParams, Request, Result
from llamado.engine.sampling.params import Sampling
from llamado.models.memory import KeysValues, LayerMemory

from .conftest import OpenModel
from .fake import ALL, STATE, FakeForward, FakeTokenizer, ask, send, settled
from .test_drafting import LateForward, ScriptedDrafter, free

KINDS: dict[str, tuple[LayerMemory, ...]] = {
    "states": (STATE, STATE),
    "hybrid": (STATE, ALL, KeysValues(1, 1, 40), STATE),
}
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(params=KINDS)
def layers(request: pytest.FixtureRequest) -> tuple[LayerMemory, ...]:
    return KINDS[request.param]


def new(layers: tuple[LayerMemory, ...], depth: int, n_drafted: int, **options: Any) -> FakeForward:
    given = {"layers": layers, "n_sequences": 3, "slack": 0, "max_batch": 24, "n_drafted": n_drafted, **options}
    return (FakeForward if depth == 1 else LateForward)(1024, **given)


def request(seed: int = 1, n: int = 150, temperature: float = 1.0) -> Request:
    sampling = Sampling(seed=seed, ignore_eos=True, temperature=temperature)
    return Request(prompt=[*PROMPT, seed], params=GenerationParams(n_predict=n, n_probs=2, sampling=sampling))


def answer_with(
    forward: FakeForward, drafts: DraftManager | None, requests: list[Request]
) -> tuple[list[Result], Counters]:
    with closing(Engine(forward, FakeTokenizer(), EngineOptions(n_slots=3, n_ctx=256), drafts=drafts)) as engine:
        return [client.result for client in [send(engine, one) for one in requests]], settled(engine).counters


@functools.cache
def right_answer(layers: tuple[LayerMemory, ...]) -> Result:
    """Return the answer to `request()` without drafts."""
    return answer_with(new(layers, 1, 0), None, [request()])[0][0]


@functools.cache
def right_answers(layers: tuple[LayerMemory, ...]) -> list[Result]:
    """Return the answers to `many()` without drafts."""
    return answer_with(new(layers, 1, 0, n_vocab=7), None, many())[0]


def many() -> list[Request]:
    return [request(seed, 60, temperature) for seed, temperature in enumerate((0.0, 1.0, 0.8, 1.0, 1.0, 0.5))]


def answers(results: list[Result]) -> list[object]:
    return [(r.tokens, r.probs, r.content, r.n_predicted, r.n_tokens_cached) for r in results]


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "n_drafted"), [(1, 1), (4, 1), (4, 3)])
@pytest.mark.parametrize("every", first_of([7, 10**9, 23, 3]))
def test_wrong_drafts_are_rolled_back(layers: tuple[LayerMemory, ...], depth: int, n_drafted: int, every: int) -> None:
    right = right_answer(layers)
    known = ScriptedDrafter([*PROMPT, 1, *right.tokens], lambda at: at % every == every - 1)
    forward = new(layers, depth, n_drafted)
    found, counters = answer_with(forward, free(known), [request()])
    assert answers(found) == answers([right])
    assert counters.n_accepted > (110 if every > 3 else 70)
    assert every == 3 or len(forward.sizes) < (30 if every == 10**9 else 110), "several tokens came from one batch"


@pytest.mark.parametrize("depth", [1, 4])
def test_few_tokens_are_evaluated_again(layers: tuple[LayerMemory, ...], depth: int) -> None:
    """Tokens are evaluated again only from the window before the first wrong token."""
    right = right_answer(layers)
    known = ScriptedDrafter([*PROMPT, 1, *right.tokens], lambda at: at == 100)
    forward = new(layers, depth, 3)
    found, counters = answer_with(forward, free(known), [request()])
    assert answers(found) == answers([right])
    drafted = sum(kind.n_drafted for kind in counters.drafts)
    read = sum(forward.sizes) - len(PROMPT) - (drafted - counters.n_accepted)
    assert 150 <= read < 150 + 16, read


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 4])
def test_answers_are_the_same_with_many_slots(layers: tuple[LayerMemory, ...], depth: int) -> None:
    """A small vocabulary makes many drafts right by chance."""
    found, counters = answer_with(new(layers, depth, 3, n_vocab=7), free(Suffix()), many())
    assert answers(found) == answers(right_answers(layers))
    assert sum(kind.n_drafted for kind in counters.drafts) > counters.n_accepted > 10


@pytest.mark.slow
def test_slot_is_saved_wherever_its_answer_was_cut_off(layers: tuple[LayerMemory, ...], tmp_path: Path) -> None:
    """Some of its last tokens may have to be evaluated again; it continues as if no token had been drafted."""
    text = [*PROMPT, 1, *right_answer(layers).tokens]
    drafts = free(ScriptedDrafter(text, lambda at: at % 9 == 8))
    with closing(
        Engine(new(layers, 4, 1), FakeTokenizer(), EngineOptions(n_slots=1, n_ctx=256), drafts=drafts)
    ) as engine:
        for n in range(10, 30, 3):  # with wrong drafts at distances of nine tokens
            client = send(engine, request())
            until(lambda: len(client.tokens) >= n)  # noqa: B023
            engine.cancel(client.id)
            saved = engine.save_slot(0, tmp_path / "slot").result(60)
            assert len(PROMPT) < saved.n_tokens <= len(text)
            engine.erase_slot(0).result(60)
            engine.restore_slot(0, tmp_path / "slot").result(60)
            at = min(saved.n_tokens + 2, len(text) - 1)
            sampling = Sampling(seed=1, ignore_eos=True, temperature=1.0)
            again = ask(engine, Request(prompt=text[:at], params=GenerationParams(n_predict=20, sampling=sampling)))
            assert again.tokens == text[at : at + 20] and again.n_cached == saved.n_tokens
            engine.erase_slot(0).result(60)


def test_nothing_is_drafted_without_room_for_states(layers: tuple[LayerMemory, ...]) -> None:
    _, counters = answer_with(new(layers, 1, 0), free(Suffix()), [request(n=20)])
    assert not counters.drafts


# -- a model that drafts -----------------------------------------------------------------------------------------------


def test_draft_model_with_states_evaluates_few_tokens_again(layers: tuple[LayerMemory, ...]) -> None:
    """The draft model differs from the target, so nearly all drafts are wrong; the prompt is evaluated once."""
    prompt = [1 + i % 90 for i in range(200)]
    draft = new(layers, 1, 0, n_vocab=97)
    draft.model = b"d" * 32
    draft._vocab = draft._vocab[::-1].copy()
    asked = [Request(prompt=prompt, params=GenerationParams(n_predict=20, sampling=Sampling(seed=2, ignore_eos=True)))]
    right, _ = answer_with(new((ALL,), 1, 0), None, asked)
    found, counters = answer_with(new((ALL,), 1, 0), free(ModelKind(draft, 97, ends=frozenset()), most=4), asked)
    assert found[0].tokens == right[0].tokens
    assert sum(kind.n_drafted for kind in counters.drafts) > 20 > counters.n_accepted
    assert sum(draft.sizes) < 200 + 20 * 5


# -- real models -------------------------------------------------------------------------------------------------------


@pytest.fixture
def start(open_model: OpenModel, tmp_path: Path) -> Any:
    def open_(name: str, **options: Any) -> ModelRunner:
        path = tmp_path / f"{name}.gguf"
        model = path if path.exists() else make(TINY[name], path)
        return open_model(model, n_cells=768, n_sequences=2, max_batch=32, **options)

    return open_


@pytest.mark.full
@pytest.mark.parametrize("name", ["granitehybrid", "qwen35", "mamba2", "rwkv7", "lfm2"])
def test_real_models_answer_the_same_with_drafts(start: Any, name: str) -> None:
    """Prompts of two lengths; drafts come from the right answer, sometimes wrong, or from the model itself."""
    tokenizer = FakeTokenizer(dict.fromkeys(range(1024), b"x"), eog=())

    def answer_with(runner: ModelRunner, *kinds: DraftKind) -> tuple[list[Any], int]:
        drafts = free(*kinds) if kinds else None
        with closing(Engine(runner, tokenizer, EngineOptions(n_slots=2, n_ctx=256), drafts=drafts)) as engine:
            samplings = {1: Sampling(seed=1, temperature=0.0), 9: Sampling(seed=2, temperature=0.8)}
            found = [
                ask(
                    engine,
                    Request(prompt=PROMPT * n, params=GenerationParams(n_predict=40, n_probs=2, sampling=sampling)),
                )
                for n, sampling in samplings.items()
            ]
            accepted = sum(kind.n_accepted for kind in settled(engine).counters.drafts)
            return [(r.tokens, r.probs) for r in found], accepted

    right, _ = answer_with(start(name))
    for every in (11, 4):
        first = ScriptedDrafter([*PROMPT, *right[0][0]], lambda at, every=every: at % every == every - 1)  # type: ignore[misc]
        found, accepted = answer_with(start(name, n_drafted=1), first)
        assert found == right and accepted > 20
    draft = start(name)
    found, accepted = answer_with(start(name, n_drafted=1), ModelKind(draft, draft.n_vocab, ends=frozenset()))
    assert found == right and accepted > 40
