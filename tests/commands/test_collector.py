"""Garbage collection is disabled while a server starts."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from llamado.commands import serve
from llamado.errors import LlamadoError
from llamado.processes import memory


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_collection_is_off_until_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    seen: list[bool] = []

    def run(flags: Any) -> int:
        seen.append(gc.isenabled())
        if fails:
            raise LlamadoError("no such model")
        before = gc.get_threshold()
        memory.freeze()
        gc.unfreeze()
        gc.set_threshold(*before)
        seen.append(gc.isenabled())
        return 0

    monkeypatch.setattr(serve, "_run_serve", run)
    flags: Any = None
    if fails:
        with pytest.raises(LlamadoError):
            serve.run_serve(flags)
    else:
        assert serve.run_serve(flags) == 0
    assert seen == ([False] if fails else [False, True]) and gc.isenabled()
