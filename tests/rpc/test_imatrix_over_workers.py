"""An importance matrix of a model that is split over workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiers import first_of
from tiny import TINY, make
from tiny_models import make_llama
from wire_client import running

from llamado.commands import cli
from llamado.devices.cpu.device import CpuDevice
from llamado.ggml.graph import Graph
from llamado.ggml.ops import Op
from llamado.quantize.imatrix import read_imatrix


@pytest.fixture(scope="module")
def devices() -> Iterator[list[CpuDevice]]:
    devices = [CpuDevice(1) for _ in range(2)]
    yield devices
    for device in devices:
        device.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_of(["qwen3moe", "llama"]))
def test_the_sums_are_those_of_one_machine(
    tmp_path: Path, devices: list[CpuDevice], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Sums are computed where the weights are, for experts, too; their bits do not depend on the device."""
    model = tmp_path / "m.gguf"
    if kind == "llama":
        make_llama(model, n_layer=4, wtype="F32", n_embd=64, n_ff=128)
    else:
        make(TINY[kind], model)
    (tmp_path / "t").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    base = ["imatrix", "-m", str(model), "-f", str(tmp_path / "t"), "-c", "64", "--chunks", "2", "-t", "1"]
    assert cli.main([*base, "-o", str(tmp_path / "here.gguf")]) == 0
    computed = Counter[CpuDevice]()
    submit = CpuDevice.submit

    def counted(device: CpuDevice, graph: Graph) -> None:
        computed[device] += sum(node.op is Op.REPEAT_BACK for node in graph.nodes)
        submit(device, graph)

    monkeypatch.setattr(CpuDevice, "submit", counted)
    with running(devices[0]) as one, running(devices[1]) as other:
        rpc = ["--rpc", f"{one.endpoint},{other.endpoint}"]
        assert cli.main([*base, "-o", str(tmp_path / "there.gguf"), *rpc]) == 0
    assert all(computed[device] for device in devices)  # each has weights, and adds up what goes through them
    here, there = read_imatrix(tmp_path / "here.gguf"), read_imatrix(tmp_path / "there.gguf")
    assert here.entries.keys() == there.entries.keys() and len(here.entries) > 10
    for name, sums in here.entries.items():
        assert there.entries[name].squares.tobytes() == sums.squares.tobytes()
        assert there.entries[name].counts.tolist() == sums.counts.tolist()
    assert cli.main([*base, "-o", str(tmp_path / "x"), "--rpc", "no:port:here"]) == 2
