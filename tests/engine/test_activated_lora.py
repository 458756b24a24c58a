"""Activated LoRAs: the tokens before the invocation use the base model, and share its KV cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lora_files import make_adapter
from tiny_models import make_llama
from waiting import GUARD

from llamado.engine.errors import InvalidRequest, SlotFileError
from llamado.engine.forward.contract import ActivatedScales
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.lora_scales import DefaultScales
from llamado.engine.options import EngineOptions
from llamado.engine.request import GenerationParams, Request, Result
from llamado.engine.sampling.params import Sampling
from llamado.engine.scheduler.slots import Slot

from .fake import ask, send

CALL, OTHER = [7, 8], [9]
TEXT = [10 + i % 50 for i in range(70)]
CALLED = [*TEXT, *CALL, *range(20, 30)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("alora")
    model = make_llama(folder / "m.gguf")
    first = make_adapter(folder / "a.gguf", model, size=0.5, invocation=CALL)
    return model, first, make_adapter(folder / "b.gguf", model, size=0.5, seed=1, invocation=OTHER)


def loaded(files: tuple[Path, Path, Path], **options: object) -> LoadedModel:
    lora = tuple((str(path), 0.0) for path in files[1:])
    return LoadedModel.load(files[0], EngineOptions(n_ctx=512, n_threads=1, lora=lora, **options))  # type: ignore[arg-type]


@pytest.fixture
def llama(files: tuple[Path, Path, Path]) -> Iterator[LoadedModel]:
    with loaded(files, n_slots=3, cache_ram=16) as llama:
        yield llama


def request(prompt: list[int], lora: dict[int, float], **options: object) -> Request:
    return Request(
        prompt=prompt,
        params=GenerationParams(
            n_predict=6, n_probs=3, lora=lora, sampling=Sampling(seed=1, temperature=0.0), **options
        ),
    )  # type: ignore[arg-type]


def output(result: Result) -> tuple[object, ...]:
    return result.tokens, result.probs


def test_activation_starts_at_the_invocation_tokens() -> None:
    scales = DefaultScales((0.0, 0.0, 0.0), (CALL, OTHER, ()))
    for prompt, start in (([1, 7, 8, 2, 7, 8, 3], 3), ([1, 2, 7, 8], 1), ([7, 8], None), ([1, 7, 8], None)):
        assert scales.for_prompt({0: 1.0}, prompt) == (
            (1.0, 0.0, 0.0) if start is None else ActivatedScales((1.0, 0.0, 0.0), start)
        )
    assert scales.for_prompt({0: 1.0}, [8, 7, 1]) == () == scales.for_prompt({}, [7, 8])
    assert scales.for_prompt({0: 1.0}, [5, 7, 8, 8]) == ()  # as llama-server, which looks at the last 8 only once
    assert scales.for_prompt({0: 1.0, 2: 0.5}, [1, 2, 3]) == (1.0, 0.0, 0.5)
    with pytest.raises(InvalidRequest, match="multiple aLoRAs"):
        scales.for_prompt({0: 1.0, 1: 1.0}, [1, 7, 8, 9])
    assert ActivatedScales((1.0,), 2) != (1.0,) != ActivatedScales((1.0,), 3) != ActivatedScales((1.0,), 2)


@pytest.mark.slow
def test_cells_before_the_invocation_are_shared(llama: LoadedModel, files: tuple[Path, Path, Path]) -> None:
    engine = llama.engine
    plain = ask(engine, request(TEXT, {}))
    called = ask(engine, request(CALLED, {0: 1.0}))
    assert called.n_cached == len(TEXT) - 1, "cells of the base model; one more token belongs to the adapter"
    again = ask(engine, request([*CALLED, 3], {0: 1.0}))
    assert again.n_cached == len(CALLED), "and cells of the adapter"
    base = ask(engine, request(CALLED, {}))
    assert base.n_cached == len(TEXT) - 1 or base.n_cached == len(TEXT) + len(plain.tokens) - 1
    uncalled = ask(engine, request(TEXT, {0: 1.0}))
    other = ask(engine, request([*TEXT, *OTHER, *CALL, 1], {1: 1.0}))
    assert other.n_cached == len(TEXT) - 1
    asked = [
        (CALLED, {0: 1.0}),
        ([*CALLED, 3], {0: 1.0}),
        (CALLED, {}),
        (TEXT, {0: 1.0}),
        ([*TEXT, *OTHER, *CALL, 1], {1: 1.0}),
    ]
    found = [called, again, base, uncalled, other]
    with loaded(files, n_slots=1, n_batch=16, n_ubatch=16) as alone:
        for (prompt, lora), one in zip(asked, found, strict=True):
            assert output(ask(alone.engine, request(prompt, lora, cache_prompt=False))) == output(one)
    assert output(uncalled) == output(plain) and output(called) != output(base)
    for cache_prompt in (False, True):  # concurrently, reusing each other's cells and those in the prompt cache
        for order in (1, -1):
            clients = [
                send(engine, request(p, lora, cache_prompt=cache_prompt)) for p, lora in [*asked, *asked][::order]
            ]
            right = [output(one) for one in [*found, *found][::order]]
            assert [output(client.result) for client in clients] == right, (cache_prompt, order)


def test_context_shift_moves_the_activation_start() -> None:
    for start, n_keep, n_discard, moved in ((20, 4, 8, 12), (10, 4, 8, 4), (3, 4, 8, 3), (6, 0, 8, 0)):
        slot = Slot(0, 64)
        slot.length, slot.scales = 40, ActivatedScales((1.0,), start)
        slot.shift(n_keep, n_discard)
        assert slot.scales == (ActivatedScales((1.0,), moved) if moved else (1.0,))


@pytest.mark.slow
def test_slot_file_saved_with_an_activated_lora_is_refused(llama: LoadedModel, tmp_path: Path) -> None:
    ask(llama.engine, request(CALLED, {0: 1.0}, id_slot=0))
    llama.engine.save_slot(0, tmp_path / "slot").result(GUARD)
    with pytest.raises(SlotFileError):
        llama.engine.restore_slot(1, tmp_path / "slot").result(GUARD)
