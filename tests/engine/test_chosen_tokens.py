"""Models that select tokens or experts: the same answers over turns, from saved slots, and after a loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import first_of
from tiny import TINY, make
from waiting import until

from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.engine import Engine
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.request import Defaults, Request
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model

from . import test_restore
from .conftest import OpenModel
from .fake import FakeTokenizer, ask, send

Open = Callable[[], ModelRunner]
TOKENIZER = FakeTokenizer(dict.fromkeys(range(512), b"x"), eog=())
SIZES: dict[str, Any] = {"n_cells": 1536, "n_sequences": 3, "max_batch": 32}


NAMES = [
    "hrm_text", "glm5-next", "hy_v4", "dots3note", "minimax-m3", "graniteswitch", "qwen4exp", "kimi-k3", "minimax-01",
]  # fmt: skip


@pytest.fixture(scope="module", params=first_of(NAMES))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(TINY[request.param], tmp_path_factory.mktemp("model") / "m.gguf")


@pytest.fixture
def start(open_model: OpenModel, path: Path) -> Open:
    return partial(open_model, path, **SIZES)


def text(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(6, 310, n).tolist()


def req(prompt: list[int], n: int = 12, **options: Any) -> Request:
    return Defaults().request(prompt, n_predict=n, temperature=0.0, seed=1, n_probs=3, **options)


@pytest.mark.slow
def test_turns_and_restored_slots_match_full_evaluation(start: Open, tmp_path: Path) -> None:
    runner = start()
    engine = Engine(runner, TOKENIZER, EngineOptions(n_slots=3, n_ctx=512, cache_ram=-1))
    alone = Engine(start(), TOKENIZER, EngineOptions(n_slots=1, n_ctx=512))
    try:

        def check(prompt: list[int], n_cached: int, **options: Any) -> list[int]:
            right = ask(alone, req(prompt, cache_prompt=False))
            found = ask(engine, req(prompt, **options))
            assert (found.tokens, found.probs) == (right.tokens, right.probs)
            assert found.n_cached >= n_cached
            return found.tokens

        prompt = text(4, 190)
        first = check(prompt, 0, id_slot=0)
        turn = [*prompt, *first, 7, 8, 9]
        check(turn, 190, id_slot=0)
        # States exist only at positions where a checkpoint was expected to be useful.
        check(prompt[:150] + text(5, 20), 0 if runner.memory.has_states else 100, id_slot=1)
        check([*turn, 10], 190, id_slot=2)
        engine.save_slot(2, tmp_path / "a").result(60)
        engine.erase_slot(0).result(60)
        engine.restore_slot(0, tmp_path / "a").result(60)
        check([*turn, 10, 11], 200, id_slot=0)
    finally:
        engine.close()
        alone.close()


@pytest.mark.full
def test_losing_a_worker_does_not_change_answers(path: Path, start: Open, jit: Jit) -> None:
    """Layers lie on two devices, and one fails twice during the answers."""
    prompts = [text(7, 150), text(8, 60), text(7, 150)[:120] + text(9, 20)]
    engine = Engine(start(), TOKENIZER, EngineOptions(n_slots=3, n_ctx=512))
    right = [ask(engine, req(prompt, 40, cache_prompt=False)).tokens for prompt in prompts]
    engine.close()
    with GGUFFile.open(path) as file:
        n = load_model(file).hparams.n_layer
    placement = Placement((1,) * (n // 2) + (2,) * (n - n // 2), 2)
    cluster = test_restore.Cluster(path, placement, jit, **SIZES)
    engine = Engine(cluster.forward, TOKENIZER, EngineOptions(n_slots=3, n_ctx=512))
    try:
        clients = [send(engine, req(prompt, 40)) for prompt in prompts]
        for n_tokens in (3, 20):
            until(lambda n=n_tokens: any(len(client.tokens) > n for client in clients))  # type: ignore[misc]
            cluster.device(1).die()
        assert [client.result.tokens for client in clients] == right
    finally:
        engine.close()
        cluster.forward.close()
        cluster.file.close()
