"""What does not run here is refused by name: before it is fetched, and at load, by whatever command asks."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_gemma3, make_llama

from llamado.commands import cli
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.kernels.formats import FORMATS
from llamado.devices.device import DeviceError
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.supported import check_supported
from llamado.gguf.header import Header, TensorInfo
from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.catalogue import LARGE
from llamado.gguf.types import TensorType
from llamado.models import ARCHITECTURES, UnsupportedModel, load_model
from llamado.router.downloads import Downloads

sys.path.insert(0, str(Path(__file__).parent.parent / "gguf"))
import gguf_bytes as by
import stand_in_sites as loopback

SUPPORTED = ", ".join(sorted(ARCHITECTURES))


def of_type(type: TensorType) -> Header:
    name = "blk.0.ffn_up.weight"
    tensors = {name: TensorInfo(name, type, (256, 1, 1, 1), 0, type.row_bytes(256), 0)}
    return Header("it.gguf", Metadata({"general.architecture": "llama"}), tensors)


@pytest.mark.parametrize("type", TensorType)
def test_types_of_weights(type: TensorType) -> None:
    check_supported(of_type(type), workers=True)
    if type in FORMATS:
        check_supported(of_type(type))
        return
    with pytest.raises(UnsupportedModel, match=rf"it\.gguf.*'blk\.0\.ffn_up\.weight'.*{type.name}.*BF16, F16.*Q6_K"):
        check_supported(of_type(type))


def test_architectures_and_experts() -> None:
    for name in ARCHITECTURES:
        check_supported(Header("it", Metadata({"general.architecture": name}), {}))
    with pytest.raises(UnsupportedModel, match=f"it: .*'glm4moelite' do not run here; those of {SUPPORTED} do$"):
        check_supported(Header("it", Metadata({"general.architecture": "glm4moelite"}), {}))


@pytest.mark.parametrize("wtype", ["Q2_K", "IQ4_XS", "TQ1_0"])
def test_a_type_without_a_kernel_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wtype: str
) -> None:
    path = make_llama(tmp_path / "m.gguf", n_embd=256, types={"ffn_down": wtype})
    monkeypatch.setattr(CpuDevice, "__init__", lambda *_, **__: pytest.fail("it came as far as the device"))
    with pytest.raises(UnsupportedModel, match=rf"'blk\.0\.ffn_down\.weight' is of type {wtype}"):
        LoadedModel.load(path, EngineOptions(n_ctx=64))


def test_the_device_refuses_it_too(tmp_path: Path) -> None:
    with GGUFFile.open(make_gemma3(tmp_path / "m.gguf", n_embd=256, types={"ffn_down": "Q3_K"})) as file:
        weights = [(w, file.data(name)) for name, w in load_model(file).weights.items()]
        device = CpuDevice(1)
        with pytest.raises(DeviceError, match=r"blk\.0\.ffn_down\.weight is of type Q3_K.*Q4_K"):
            device.load(weights)
        device.close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[loopback.Site]:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "cache"))
    content = by.file(
        [by.entry("general.architecture", by.STRING, by.text("zebra"))], [by.tensor("a", [4 << 20])], bytes(16 << 20)
    )
    with loopback.serve(loopback.Site(headers={"ETag": f'"{"e" * 40}"'})) as served:
        loopback.add_repo(served, "me/big", {"big-Q4_K_M.gguf": content})
        served.files["/big.gguf"] = content
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def fetched_bytes(site: loopback.Site) -> int:
    return sum(n for path, n in site.sent.items() if path.endswith(".gguf"))


SAYS = f"'zebra' do not run here; those of {SUPPORTED} do"


def test_serving(site: loopback.Site) -> None:
    for source in (ModelSource(spec=f"{site.url}/big.gguf"), ModelSource(hf_repo="me/big")):
        with pytest.raises(UnsupportedModel, match=SAYS):
            source.fetch()
    assert 0 < fetched_bytes(site) <= 2 << 20


@pytest.mark.parametrize(
    "what",
    [["pull", "-hf", "me/big"], ["pull", "hf:me/big"], ["pull", "qwen3"], ["inspect", "glm"], ["plan", "-m", "glm"]],
)
def test_commands(site: loopback.Site, capsys: pytest.CaptureFixture[str], what: list[str]) -> None:
    assert cli.main(what) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"do not run here; those of {SUPPORTED} do" in said
    if what[-1] in LARGE:
        assert not site.asked
    assert fetched_bytes(site) <= 1 << 20


def test_inspect_says_whether_a_file_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(make_llama(tmp_path / "a.gguf"))]) == 0
    assert "Its architecture and its types of weights run here." in capsys.readouterr().out
    assert cli.main(["inspect", str(make_llama(tmp_path / "b.gguf", n_embd=256, types={"ffn_up": "Q2_K"}))]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "This model does not run here." in said and "'blk.0.ffn_up.weight' is of type Q2_K" in said


@pytest.mark.parametrize("name", ["me/big", "qwen3"])
def test_downloads_of_the_router(site: loopback.Site, name: str) -> None:
    events: list[tuple[str, str, Any]] = []

    async def download() -> None:
        over = asyncio.Event()

        def changed(event: str, model: str, data: Any) -> None:
            events.append((event, model, data))
            if event in ("download_failed", "download_finished"):
                over.set()

        Downloads(changed, lambda: None).start(name)
        await asyncio.wait_for(over.wait(), 60)

    asyncio.run(download())
    assert events[-1][:2] == ("download_failed", name) and f"those of {SUPPORTED} do" in events[-1][2]["reason"]
    assert fetched_bytes(site) <= 1 << 20
