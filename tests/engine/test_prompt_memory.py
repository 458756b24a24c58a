"""The memory limit of the prompt cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_llama

from llamado.devices.limits import MachineMemory
from llamado.engine import loaded_model
from llamado.engine.forward.fitting import prompt_memory
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions

GIB = 1 << 30


def test_default_limit_is_half_of_the_memory() -> None:
    assert prompt_memory(8192, 64 * GIB) == 8192
    assert prompt_memory(8192, 4 * GIB) == 2048
    assert prompt_memory(100, 4 * GIB) == 100
    assert prompt_memory(0, 4 * GIB) == 0
    assert prompt_memory(-1, 4 * GIB) == -1  # -1 means no limit


def test_container_limit_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_llama(tmp_path / "m.gguf", n_embd=32, n_ff=32, n_layer=1)
    given: list[int] = []

    class Stop(Exception):
        pass

    def remember(forward: object, tokenizer: object, options: EngineOptions, **parts: Any) -> None:
        given.append(options.cache_ram)
        raise Stop

    monkeypatch.setattr(loaded_model, "Engine", remember)
    monkeypatch.setattr(loaded_model, "memory", lambda: MachineMemory(GIB, 2 * GIB, 64 * GIB))
    with pytest.raises(Stop):
        LoadedModel.load(path, EngineOptions(n_ctx=64, n_threads=1, cache_ram=8192))
    assert given == [1024]
