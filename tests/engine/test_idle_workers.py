"""The log lists what each device holds, or that it holds no layers, with the reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import make_llama

from llamado.devices.accelerators import Accelerators, LocalDevices
from llamado.devices.split.explain import holdings, idle, shares_text
from llamado.devices.split.placement import (
    DeviceFigures,
    ModelSizes,
    Placement,
    SplitOptions,
)
from llamado.devices.split.rules import UnknownDevice, place
from llamado.engine.forward import device_pool
from llamado.engine.forward.fitting import MemoryRequest
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import load_model

SIZES = ModelSizes(layers=(10**8,) * 8, kv=(10**6,) * 8, head=10**7, hidden=4096, logits=10**5, compute=10**6)
MUCH = 1 << 40


def figures(*workers: tuple[float, int, float]) -> list[DeviceFigures]:
    """Return this machine and workers, given as (bytes per second, free memory, round trip)."""
    here = DeviceFigures(name="CPU", local=True, free=MUCH, total=MUCH, decode=1e10, prefill=1e10)
    return [here, *(
        DeviceFigures(name=f"RPC{i}[h:{i + 1}]", local=False, free=free, total=MUCH, decode=rate, prefill=rate,
                      round_trip=round_trip, bandwidth=1e9)
        for i, (rate, free, round_trip) in enumerate(workers)
    )]  # fmt: skip


def why(found: list[DeviceFigures], **options: Any) -> dict[int, str]:
    split = SplitOptions(rpc=tuple(f"h:{i}" for i in range(1, len(found))), **options)
    return idle(SIZES, found, split, place(SIZES, found, split))


def test_slow_worker_gets_no_layers() -> None:
    slow = figures((1e9, MUCH, 0.005))
    (reason,) = why(slow).values()
    # 810 MB at 10 GB/s here; a layer of 100 MB at 1 GB/s there, and two transfers over the link
    assert reason.startswith("it would make answers slower: a token takes 81.00 ms without it and 176.")
    assert "1.0 GB/s" in reason and "5.00 ms" in reason
    assert why(figures((1e11, MUCH, 1e-6))) == {}, "one that has layers"


def test_worker_without_memory_gets_no_layers() -> None:
    assert why(figures((1e11, 5 << 20, 1e-6)))[1] == "a layer takes 97 MiB, and it has 5.0 MiB free"


def test_flags_exclude_workers() -> None:
    two = figures((1e11, MUCH, 1e-6), (1e11, MUCH, 1e-6))
    assert why(two, tensor_split=(1.0, 0.0))[2] == "its share of --tensor-split is 0"
    assert why(two, tensor_split=(100.0, 1.0))[2] == "its share of --tensor-split is less than a layer"
    assert why(two, devices=("RPC1", "CPU"))[1] == "--device does not name it"
    assert why(two, n_gpu_layers=0, tensor_split=(1.0, 1.0)).keys() == {1, 2}
    assert "--n-gpu-layers 0" in why(two, n_gpu_layers=0, tensor_split=(1.0, 1.0))[1]
    by_memory = figures((1e11, MUCH, 1e-6), (1e11, 120 << 20, 1e-6))
    assert why(by_memory, tensor_split=())[2].startswith(("by free memory", "it would make answers slower"))


def holding_texts(found: list[DeviceFigures], **options: Any) -> dict[int, str]:
    split = SplitOptions(rpc=tuple(f"h:{i}" for i in range(1, len(found))), **options)
    return holdings(SIZES, found, split, place(SIZES, found, split))


def test_shares_are_matched_to_devices() -> None:
    """Guides give this machine the first share or the last; it has the last."""
    two = figures((1e11, MUCH, 1e-6), (1e11, MUCH, 1e-6))
    for options, expected in (
        ({"tensor_split": (0.5, 0.25, 0.25)}, "RPC0[h:1] 0.5, RPC1[h:2] 0.25, CPU (this machine) 0.25"),
        ({"tensor_split": (3.0, 1.0)}, "RPC0[h:1] 3, RPC1[h:2] 1"),
        ({"tensor_split": (3.0,)}, "RPC0[h:1] 3, RPC1[h:2] 0"),
        ({"tensor_split": (3.0, 1.0), "devices": ("CPU", "RPC1")}, "CPU (this machine) 3, RPC1[h:2] 1"),
    ):
        assert shares_text(two, SplitOptions(rpc=("h:1", "h:2"), **options)) == f"--tensor-split: {expected}"
    assert shares_text(two, SplitOptions(tensor_split=())) == "" == shares_text(two, SplitOptions())


def test_tensor_split_is_given_as_the_reason() -> None:
    two = figures((1e11, MUCH, 1e-6), (1e11, MUCH, 1e-6))
    assert holding_texts(two, tensor_split=(2.0, 1.0)) == {
        0: "the embedding alone: --tensor-split has no share for it",
        1: "layers 0 to 5 (572 MiB of weights, 5.7 MiB of K/V cache): its share of --tensor-split is 2 of 3",
        2: "layers 6 to 7 and the head (200 MiB of weights, 1.9 MiB of K/V cache): "
        "its share of --tensor-split is 1 of 3",
    }
    assert (
        holding_texts(two, tensor_split=(1.0, 1.0, 0.0))[0] == "the embedding alone: its share of --tensor-split is 0"
    )
    kept = holding_texts(two, tensor_split=(1.0, 1.0, 1.0), n_gpu_layers=3)[0]
    assert kept.endswith("--n-gpu-layers 3 leaves all but the last 3 layers (the head counts as one) on this machine; "
                         "its share of --tensor-split is 1 of 3")  # fmt: skip


def test_reason_for_placing_everything_on_one_worker() -> None:
    quick = figures((1e11, MUCH, 1e-3), (1e9, MUCH, 1e-3))
    found = holding_texts(quick)
    assert found[1].startswith("everything, layers 0 to 7 and the head (772 MiB of weights, 7.6 MiB of K/V cache): ")
    assert (
        "the least time per token, 9.20 ms predicted, 81.00 ms with everything on CPU (it reads 100.0 GB/s" in found[1]
    )
    assert "a round trip takes 1.00 ms)" in found[1] and 2 not in found
    assert found[0].startswith("the embedding alone: it would make answers slower: a token takes 9.20 ms without it")
    assert "round trip" not in found[0], "this machine has no link"
    small = [replace(quick[0], free=5 << 20), *quick[1:]]
    assert "; CPU has no room for everything (" in holding_texts(small)[1]
    assert holding_texts(quick, devices=("RPC1",))[2].endswith(": --device names it alone")
    assert "--device does not name it" in holding_texts(quick, devices=("RPC1",))[0]


def test_other_reasons() -> None:
    one = figures((1e9, 3 << 30, 1e-3))
    assert holding_texts(one)[0].startswith("everything, layers 0 to 7 and the head (")
    assert holding_texts(one)[0].endswith(": the least time per token, 81.00 ms predicted (it reads 10.0 GB/s)")
    found = holding_texts(one, tensor_split=())
    assert found[0] == "the embedding alone: --tensor-split memory divides among the workers alone"
    assert found[1].endswith(": --tensor-split memory: it has 3,072 MiB of the 3,072 MiB that are free")
    assert (
        holding_texts(one, n_gpu_layers=99)[0]
        == "the embedding alone: --n-gpu-layers 99 gives every layer to the workers"
    )
    assert holding_texts(one, n_gpu_layers=0)[0].endswith(": --n-gpu-layers 0 leaves everything on this machine")
    assert holding_texts(one, devices=("none",))[0].endswith(": --device names no worker")
    assert holding_texts(figures())[0].endswith(": there are no workers")
    split = SplitOptions(rpc=("h:1",))
    by_hand = holdings(SIZES, one, split, Placement((0,) * 4 + (1,) * 4, 1, 0), "layers were laid out by hand")
    assert all(text.endswith(": layers were laid out by hand") for text in by_hand.values()) and len(by_hand) == 2


def pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[DeviceFigures], split: SplitOptions
) -> device_pool.DevicePool:
    """A tiny model on devices with these figures."""

    class Workers:
        def devices(self, *_: Any) -> list[Any]:
            return [SimpleNamespace(name=found[1].name, close=lambda: None)]

        def expect_answers(self, seconds: float | None) -> None:
            pass

    def measured(devices: Sequence[Any], **_: Any) -> list[DeviceFigures]:
        return found

    monkeypatch.setattr(device_pool, "backend", lambda *_: Workers())
    monkeypatch.setattr(device_pool, "measure_all", measured)
    monkeypatch.setattr(device_pool, "figures_of", lambda device: found[device.name != "CPU"])
    path = make_llama(tmp_path / "tiny.gguf", n_vocab=320)
    with GGUFFile.open(path) as file:
        wanted = MemoryRequest(256, 1, True, 64, TensorType.F16, TensorType.F16)
        here: Any = SimpleNamespace(name="CPU", close=lambda: None)
        local = LocalDevices(here, Accelerators.none())
        return device_pool.DevicePool(split, local, file, load_model(file), wanted)


def test_devices_and_reasons_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamado")
    home = pool(tmp_path, monkeypatch, figures((1e7, MUCH, 0.01)), SplitOptions(rpc=("h:1",)))
    assert home.fit.placement == Placement((0, 0), 0, 0) and "layers" not in caplog.text, (
        "it is logged once all devices are connected"
    )
    home.log_placement(home.fit.placement)
    assert "CPU: everything, layers 0 to 1 and the head" in caplog.text and "the least time per token" in caplog.text
    assert "RPC0[h:1]: gets no layers: it would make answers slower: a token takes" in caplog.text


def test_shares_of_devices_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamado")
    pool(tmp_path, monkeypatch, figures((1e7, MUCH, 0.01)), SplitOptions(rpc=("h:1",), tensor_split=(3.0, 1.0)))
    assert "--tensor-split: RPC0[h:1] 3, CPU (this machine) 1" in caplog.text
    with pytest.raises(UnknownDevice, match="3 shares for 2 devices"):
        pool(
            tmp_path, monkeypatch, figures((1e7, MUCH, 0.01)), SplitOptions(rpc=("h:1",), tensor_split=(3.0, 1.0, 1.0))
        )
