"""Draft heads that use the model's hidden states: right if they equal the model, and invisible in answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from headed_models import make_headed
from tiers import chosen
from tiny_models import make_llama

from llamado.engine.drafts.contract import Proposal
from llamado.engine.drafts.cost import Cost
from llamado.engine.drafts.head import HeadKind
from llamado.engine.drafts.model import DraftQuery
from llamado.engine.engine import Engine
from llamado.engine.errors import EngineError
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions, ModelSource
from llamado.engine.request import GenerationParams, Request, Result
from llamado.engine.sampling.params import Sampling
from llamado.models import InvalidModel, UnsupportedModel
from llamado.models.heads.next_token import HEADS

from .fake import send

PROMPTS = ("Once upon a time there was a king", "the quick brown fox jumps over the lazy dog " * 12, "Hello")


class Free(Cost):
    """Makes batches free, so that drafting always pays."""

    def least_gain(self, n_generating: int, seconds: float = 0.0) -> float:
        return 0.0

    def drafts(self, n_generating: int) -> bool:
        return True


def load(path: Path, kind: str | None, model: Path | None = None, **options: Any) -> LoadedModel:
    source = None if model is None else ModelSource(spec=str(model))
    drafts = DraftOptions(kinds=(kind,) if kind else (), most=4, model=source)
    loaded = LoadedModel.load(path, EngineOptions(**{"n_ctx": 512, "n_threads": 1, **options}, drafts=drafts))
    if kind:
        engine_of(loaded)._drafts.cost = Free()  # type: ignore[union-attr]
    return loaded


def engine_of(model: LoadedModel) -> Engine:
    assert isinstance(model.engine, Engine)
    return model.engine


def answers(model: LoadedModel, n: int = 24) -> list[Result]:
    return [
        model.complete(prompt, n_predict=n, seed=3, temperature=t, ignore_eos=True, n_probs=2)
        for prompt in PROMPTS
        for t in (0.0, 0.8)
    ]


def outputs(results: Sequence[Result]) -> list[Any]:
    return [(r.tokens, r.content, r.probs, r.stop_type, r.n_predicted) for r in results]


def accepted(results: Sequence[Result]) -> float:
    drafted = sum(r.timings.draft_n or 0 for r in results)
    assert drafted > 2 * len(results)
    return sum(r.timings.draft_n_accepted or 0 for r in results) / drafted


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(sorted(HEADS), ("glm4moe", "qwen3next")))
def test_head_equal_to_the_model_is_always_right(name: str, tmp_path: Path) -> None:
    path = make_headed(tmp_path / "m.gguf", name, quiet=True)
    with load(path, None) as model:
        plain = outputs(answers(model))
    with load(path, "draft-mtp") as model:
        found = answers(model)
    assert outputs(found) == plain
    # Rounding decides some experts and the view of a window; Nemotron 3 has a different last norm.
    assert accepted(found) > (0.4 if name == "nemotron_h_moe" else 0.98)


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(["mimo2", "step35"], ["mimo2"]))
def test_each_additional_head_drafts_one_more_token(name: str, tmp_path: Path) -> None:
    path = make_headed(tmp_path / "m.gguf", name, n_heads=3)
    with load(path, None, n_slots=2) as model:
        plain, side_by_side = outputs(answers(model)), work(model, disturbed=False)
    with load(path, "draft-mtp", n_slots=2) as model:
        found = answers(model)
        assert outputs(found) == plain and accepted(found) > 0.98
        assert work(model, disturbed=True) == side_by_side


@pytest.mark.slow
@pytest.mark.parametrize("name", chosen(["glm4moe", "step35", "qwen35"], ["glm4moe", "qwen35"]))
def test_head_gets_the_hidden_state_of_the_previous_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A head that repeats the model's prediction drafts the last token, which that hidden state predicted.

    States are taken after the last norm, and before it; and from a model with recurrent states.
    """
    drafted: list[tuple[int, list[int]]] = []
    propose = HeadKind.propose

    def recording_propose(self: HeadKind, asks: Sequence[DraftQuery], chance: Any) -> list[Proposal]:
        found = propose(self, asks, chance)
        drafted.extend((ask.history[-1], proposal.tokens) for ask, proposal in zip(asks, found, strict=True))
        return found

    monkeypatch.setattr(HeadKind, "propose", recording_propose)
    with load(make_headed(tmp_path / "m.gguf", name, repeats=True), "draft-mtp") as model:
        for prompt in PROMPTS:
            model.complete(prompt, n_predict=24, temperature=0.0, ignore_eos=True)
    assert len(drafted) > 40
    assert all(tokens == [last] * len(tokens) and tokens for last, tokens in drafted)


def work(model: LoadedModel, *, disturbed: bool) -> list[Any]:
    """Run concurrent and consecutive requests that share prefixes.

    With `disturbed`, some are cancelled, cells are dropped in the middle, and a slot is saved and restored.
    """
    random_, engine, found = random.Random(5), engine_of(model), []
    common = [random_.randrange(1, 500) for _ in range(40)]
    for round_ in range(2):
        requests = [
            Request(
                prompt=[*common[: 40 * (i % 2)], *(random_.randrange(1, 500) for _ in range(3 + 11 * i))],
                params=GenerationParams(
                    n_predict=12 + 3 * i,
                    n_probs=1,
                    sampling=Sampling(seed=i, ignore_eos=True, temperature=0.8 * (i % 2)),
                ),
            )
            for i in range(5)
        ]
        clients = [send(engine, request) for request in requests]
        if disturbed:
            for request in requests[:2]:
                engine.cancel(send(engine, request).id)
            engine.between_steps(lambda: None, forget=True)
        found += [client.result for client in clients]
        again = Request(
            prompt=[*requests[4].prompt, *found[-1].tokens, 7, 9],
            params=GenerationParams(n_predict=9, n_probs=1, sampling=Sampling(seed=round_, ignore_eos=True)),
        )
        found.append(send(engine, again).result)
    return outputs(found)


@pytest.mark.full
@pytest.mark.parametrize("name", ["glm4moe", "mimo2", "qwen35moe"])
def test_answers_are_the_same_with_and_without_heads(name: str, tmp_path: Path) -> None:
    path = make_headed(tmp_path / "m.gguf", name, sway=0.3)
    options = {"n_slots": 3, "n_batch": 24, "n_ctx": 768, "cache_ram": 16}
    with load(path, None, **options) as model:
        plain = work(model, disturbed=False)
    with load(path, "draft-mtp", **options) as model:
        assert work(model, disturbed=False) == plain
        assert work(model, disturbed=True) == plain
        counts = engine_of(model).snapshot().counters.drafts
        assert [count.name for count in counts] == ["draft-mtp"]
        assert 0 < counts[0].n_accepted < 0.9 * counts[0].n_drafted


@pytest.mark.slow
def test_context_shift_works_with_a_draft_head(tmp_path: Path) -> None:
    path = make_headed(tmp_path / "m.gguf", "glm4moe", sway=0.2)
    found = []
    for kind in (None, "draft-mtp"):
        with load(path, kind, n_ctx=256, context_shift=True) as model:
            found.append(model.complete(PROMPTS[0], n_predict=270, seed=1, temperature=0.5, ignore_eos=True))
    assert found[0].tokens == found[1].tokens and len(found[0].tokens) == 270
    assert accepted(found[1:]) > 0.05


@pytest.mark.slow
def test_head_starts_after_restored_cells_without_hidden_states(tmp_path: Path) -> None:
    """A restored slot has cells without hidden states, so the head starts after them."""
    path = make_headed(tmp_path / "m.gguf", "glm4moe")
    request = Request(
        prompt=[*range(5, 120)], params=GenerationParams(n_predict=8, sampling=Sampling(seed=1, ignore_eos=True))
    )
    with load(path, None) as model:
        plain = send(engine_of(model), request).result
    with load(path, "draft-mtp") as model:
        send(engine_of(model), request).result  # noqa: B018
        engine_of(model).save_slot(0, tmp_path / "slot").result()
    with load(path, "draft-mtp") as model:
        engine, rows = engine_of(model), []
        start = model.draft.runner.start  # type: ignore[union-attr]
        model.draft.runner.start = lambda tokens, *a, **o: (rows.append(len(tokens)), start(tokens, *a, **o))[1]  # type: ignore
        engine.restore_slot(0, tmp_path / "slot").result()
        found = send(engine, request).result
        assert found.tokens == plain.tokens
        assert found.timings.cache_n > 100 and found.timings.draft_n and sum(rows) < 40
        rows.clear()
        other = Request(
            prompt=[9, *range(5, 120)], params=GenerationParams(n_predict=8, sampling=Sampling(seed=1, ignore_eos=True))
        )
        timings = send(engine, other).result.timings
        assert timings.draft_n_accepted == timings.draft_n and (timings.draft_n or 0) > 3 and sum(rows) > 115


@pytest.mark.slow
def test_head_starts_at_the_first_hidden_state_after_a_shift(tmp_path: Path) -> None:
    """The head started late, since the first tokens had no hidden states; after the shift all cells have them."""
    path = make_headed(tmp_path / "m.gguf", "glm4moe")
    request = Request(
        prompt=[*range(5, 230)], params=GenerationParams(n_predict=8, sampling=Sampling(seed=1, ignore_eos=True))
    )
    with load(path, None, n_ctx=256) as model:
        send(engine_of(model), request).result  # noqa: B018
        engine_of(model).save_slot(0, tmp_path / "slot").result()
    with load(path, "draft-mtp", n_ctx=256, context_shift=True) as model:
        engine_of(model).restore_slot(0, tmp_path / "slot").result()
        again = Request(
            prompt=request.prompt,
            params=GenerationParams(n_predict=120, sampling=Sampling(seed=1, ignore_eos=True, temperature=0)),
        )
        timings = send(engine_of(model), again).result.timings
        assert timings.cache_n > 200 and (timings.draft_n_accepted or 0) > 60


@pytest.mark.slow
def test_head_keeps_its_cells_over_chat_turns(tmp_path: Path) -> None:
    path = make_headed(tmp_path / "m.gguf", "glm4moe")
    with load(path, "draft-mtp", n_ctx=1024) as model:
        rows: list[int] = []
        start = model.draft.runner.start  # type: ignore[union-attr]
        model.draft.runner.start = lambda tokens, *a, **o: (rows.append(len(tokens)), start(tokens, *a, **o))[1]  # type: ignore
        prompt = [*range(5, 400)]
        for turn in range(3):
            rows.clear()
            result = model.complete(prompt, n_predict=10, temperature=0.0, ignore_eos=True)
            assert result.timings.draft_n_accepted == result.timings.draft_n != 0
            assert sum(rows) > 300 if turn == 0 else sum(rows) < 60
            assert 5 in rows  # accepted draft tokens are evaluated again, with the model's states
            prompt += [*result.tokens, 7, 8, 9]


@pytest.mark.slow
def test_head_is_loaded_from_its_own_file(tmp_path: Path) -> None:
    path, alone = make_headed(tmp_path / "m.gguf", "glm4moe"), tmp_path / "mtp-m.gguf"
    make_headed(alone, "glm4moe", alone=True)
    with load(path, "draft-mtp", alone) as model:
        assert accepted(answers(model)) > 0.98
    drafts = DraftOptions(model=ModelSource(spec=str(alone)))  # the kind of head comes from the file
    with LoadedModel.load(path, EngineOptions(n_ctx=512, n_threads=1, drafts=drafts)) as model:
        names = [count.name for count in engine_of(model).snapshot().counters.drafts]
        assert names == ["suffix", "draft-mtp"]


@pytest.mark.slow
def test_small_model_with_its_own_head_drafts_as_a_whole_model(tmp_path: Path) -> None:
    target = make_llama(tmp_path / "l.gguf", n_vocab=512, n_layer=3)
    small = make_headed(tmp_path / "s.gguf", "glm4moe")
    for path, kind in ((target, "draft-simple"), (small, "draft-mtp")):
        drafts = DraftOptions(model=ModelSource(spec=str(small)))
        with LoadedModel.load(path, EngineOptions(n_ctx=256, n_threads=1, drafts=drafts)) as model:
            assert [count.name for count in engine_of(model).snapshot().counters.drafts] == ["suffix", kind]


def test_model_without_a_head_is_refused(tmp_path: Path) -> None:
    llama = make_llama(tmp_path / "l.gguf", n_vocab=320)
    with pytest.raises(UnsupportedModel, match="the MTP blocks of architecture 'llama' are not supported"):
        load(llama, "draft-mtp")
    glm, deepseek = make_headed(tmp_path / "g.gguf", "glm4moe"), make_headed(tmp_path / "d.gguf", "deepseek2")
    with pytest.raises(InvalidModel, match="the block that drafts is of a deepseek2 model"):
        load(glm, "draft-mtp", deepseek)
    with pytest.raises(EngineError, match="only one draft model is possible, not draft-simple and draft-mtp"):
        LoadedModel.load(glm, EngineOptions(drafts=DraftOptions(kinds=("draft-mtp", "draft-simple"))))
