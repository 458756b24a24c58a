"""A worker that gets no layers is named at the start, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import make_llama

from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    Placement,
    SplitOptions,
)
from llamado.devices.split.rules import idle, place
from llamado.engine.forward import device_pool
from llamado.engine.forward.fitting import MemoryOptions
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_model

SIZES = ModelSizes(layers=(10**8,) * 8, kv=(10**6,) * 8, head=10**7, hidden=4096, logits=10**5, compute=10**6)
MUCH = 1 << 40


def figures(*workers: tuple[float, int, float]) -> list[DeviceFigures]:
    """This machine and workers of (bytes per second, free memory, round trip)."""
    here = DeviceFigures(name="CPU", local=True, free=MUCH, total=MUCH, decode=1e10, prefill=1e10)
    return [here, *(
        DeviceFigures(name=f"RPC{i}[h:{i + 1}]", local=False, free=free, total=MUCH, decode=rate, prefill=rate,
                      round_trip=round_trip, bandwidth=1e9)
        for i, (rate, free, round_trip) in enumerate(workers)
    )]  # fmt: skip


def why(found: list[DeviceFigures], **options: Any) -> dict[int, str]:
    split = SplitOptions(rpc=tuple(f"h:{i}" for i in range(1, len(found))), **options)
    return idle(SIZES, found, split, place(SIZES, found, split))


def test_one_that_would_make_answers_slower() -> None:
    slow = figures((1e9, MUCH, 0.005))
    (reason,) = why(slow).values()
    # 810 MB at 10 GB/s here; a layer of 100 MB at 1 GB/s there, and two ways through the link
    assert reason.startswith("it would make answers slower: a token takes 81.00 ms without it and 176.")
    assert "1.0 GB/s" in reason and "5.00 ms" in reason
    assert why(figures((1e11, MUCH, 1e-6))) == {}, "one that has layers"


def test_one_without_room() -> None:
    assert why(figures((1e11, 5 << 20, 1e-6)))[1] == "a layer takes 97 MiB, and it has 5.0 MiB free"


def test_what_flags_leave_out() -> None:
    two = figures((1e11, MUCH, 1e-6), (1e11, MUCH, 1e-6))
    assert "--tensor-split" in why(two, tensor_split=(1.0, 0.0))[2]
    assert why(two, devices=("RPC1", "CPU"))[1] == "--device does not name it"
    assert why(two, n_gpu_layers=0, tensor_split=(1.0, 1.0)).keys() == {1, 2}
    assert "--n-gpu-layers 0" in why(two, n_gpu_layers=0, tensor_split=(1.0, 1.0))[1]
    by_memory = figures((1e11, MUCH, 1e-6), (1e11, 120 << 20, 1e-6))
    assert why(by_memory, tensor_split=())[2].startswith(("by free memory", "it would make answers slower"))


def test_the_log_says_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = figures((1e7, MUCH, 0.01))

    class Workers:
        def devices(self, *_: Any) -> list[Any]:
            return [SimpleNamespace(name=found[1].name, close=lambda: None)]

    def measured(devices: Sequence[Any], **_: Any) -> list[DeviceFigures]:
        return found

    monkeypatch.setattr(device_pool, "backend", lambda *_: Workers())
    monkeypatch.setattr(device_pool, "measure_all", measured)
    caplog.set_level("INFO", "llamado")
    path = make_llama(tmp_path / "tiny.gguf", n_vocab=320)
    with GGUFFile.open(path) as file:
        wanted = MemoryOptions(256, 1, True, 64, TensorType.F16, TensorType.F16)
        here: Any = SimpleNamespace(name="CPU", close=lambda: None)
        home = device_pool.DevicePool(SplitOptions(rpc=("h:1",)), here, file, load_model(file), wanted)
    assert home.fit.placement == Placement((0, 0), 0, 0)
    assert "CPU: layers 0 to 1 and the head" in caplog.text
    assert "RPC0[h:1] gets no layers: it would make answers slower: a token takes" in caplog.text
