"""Duration of the engine's current step, which health checks use to detect a hang."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_llama
from waiting import until

from llamado.engine.engine import Engine
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.request import GenerationParams, Request

from .conftest import OpenModel
from .fake import FakeTokenizer, send


@pytest.fixture
def forward(open_model: OpenModel, tmp_path: Path) -> ModelRunner:
    return open_model(make_llama(tmp_path / "m.gguf"), n_cells=256)


def test_stalled_step_is_reported(forward: ModelRunner) -> None:
    inside, go = threading.Event(), threading.Event()
    start = forward.start

    def held(*given: Any, **options: Any) -> Any:
        inside.set()
        assert go.wait(60)
        return start(*given, **options)

    forward.start = held  # type: ignore[method-assign]
    engine = Engine(forward, FakeTokenizer(), EngineOptions(n_ctx=64))
    try:
        assert engine.stalled() == 0.0
        answer = send(engine, Request(prompt=[1, 2, 3], params=GenerationParams(n_predict=2)))
        assert inside.wait(60)
        first = engine.stalled()
        until(lambda: engine.stalled() > first)
        go.set()
        answer.wait()
        until(lambda: engine.stalled() == 0.0)
    finally:
        go.set()
        engine.close()


def test_dead_engine_thread_is_reported_as_stalled(forward: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_work", lambda self: None)
    engine = Engine(forward, FakeTokenizer(), EngineOptions(n_ctx=64))
    engine._thread.join(60)
    assert engine.stalled() == math.inf
    engine.close()
    assert engine.stalled() == 0.0, "a closed engine is not stalled"
