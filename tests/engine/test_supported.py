"""Unsupported models are refused by name, before the download and at load, by every command."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
from lora_files import make_adapter
from tiny import TINY, make
from tiny_models import make_gemma3, make_llama

from llamado.commands import cli
from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import DeviceError
from llamado.devices.kernels.formats import FORMATS
from llamado.devices.limits import MachineMemory
from llamado.devices.split.placement import DeviceFigures, NotEnoughMemory, SplitOptions, mib
from llamado.engine import supported
from llamado.engine.forward.sizes import weight_sizes
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions, ModelSource
from llamado.engine.supported import check_before_fetching, check_supported, fetch_model, memory_estimate
from llamado.ggml.role import ModelPart
from llamado.gguf.header import Header, TensorInfo
from llamado.gguf.metadata import Metadata
from llamado.gguf.reader import GGUFFile
from llamado.gguf.sources.catalog import LARGE
from llamado.gguf.types import TensorType
from llamado.models import ARCHITECTURES, UnsupportedModel, load_model
from llamado.router.downloads import Downloads

sys.path.insert(0, str(Path(__file__).parent.parent / "gguf"))
import gguf_bytes as by
import stand_in_sites as loopback


def of_type(type: TensorType) -> Header:
    name = "blk.0.ffn_up.weight"
    tensors = {name: TensorInfo(name, type, (256, 1, 1, 1), 0, type.row_bytes(256), 0)}
    return Header("it.gguf", Metadata({"general.architecture": "llama"}), tensors)


@pytest.mark.parametrize("type", TensorType)
def test_unsupported_weight_types_are_refused(type: TensorType) -> None:
    check_supported(of_type(type), workers=True)
    if type in FORMATS:
        check_supported(of_type(type))
        return
    with pytest.raises(UnsupportedModel, match=rf"it\.gguf.*'blk\.0\.ffn_up\.weight'.*{type.name}.*BF16, F16.*Q6_K"):
        check_supported(of_type(type))


def test_unsupported_adapter_types_are_refused(tmp_path: Path) -> None:
    model, name = make_llama(tmp_path / "m.gguf"), "blk.0.attn_q.weight.lora_a"

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor(name, np.zeros((8, 128), np.int32))
        writer.add_tensor(name.replace("lora_a", "lora_b"), np.zeros((128, 8), np.float32))

    path = make_adapter(tmp_path / "a.gguf", model, parts=(), edit=add)
    with pytest.raises(UnsupportedModel, match=rf"a\.gguf: tensor '{name}' is of type I32, .*MXFP4"):
        LoadedModel.load(model, EngineOptions(n_ctx=256, n_threads=1, lora=((str(path), 1.0),)))


def test_architectures_and_experts() -> None:
    for name in ARCHITECTURES:
        check_supported(Header("it", Metadata({"general.architecture": name}), {}))
    for name, says in (
        ("glm4moelite", "use the file from the Hugging Face hub"),
        ("dream", r"A diffusion model.*llama-diffusion-cli.* All supported architectures: python -m"),
        ("gemma33", r"Similar names: gemma3[,.].* All \d+ supported"),
        ("zebra", r"All \d+ supported architectures, among them .*: python -m llamado\.models\.architectures\.page"),
    ):
        with pytest.raises(UnsupportedModel, match=f"it: .*'{name}' is not supported. .*{says}"):
            check_supported(Header("it", Metadata({"general.architecture": name}), {}))


@pytest.mark.parametrize("wtype", ["Q8_K"])
def test_weight_type_without_a_kernel_is_refused_at_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wtype: str
) -> None:
    path = make_llama(tmp_path / "m.gguf", n_embd=256, types={"ffn_down": wtype})
    monkeypatch.setattr(CpuDevice, "__init__", lambda *_, **__: pytest.fail("it came as far as the device"))
    with pytest.raises(UnsupportedModel, match=rf"'blk\.0\.ffn_down\.weight' is of type {wtype}"):
        LoadedModel.load(path, EngineOptions(n_ctx=64))


def test_device_refuses_unsupported_weight_types(tmp_path: Path) -> None:
    with GGUFFile.open(make_gemma3(tmp_path / "m.gguf", n_embd=256, types={"ffn_down": "Q8_K"})) as file:
        weights = [(w, file.data(name)) for name, w in load_model(file).weights.items()]
        device = CpuDevice(1)
        with pytest.raises(DeviceError, match=r"blk\.0\.ffn_down\.weight is of type Q8_K.*Q4_K"):
            device.load(weights)
        device.close()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[loopback.Site]:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("LLAMADO_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("LLAMADO_CACHE", str(tmp_path / "cache"))
    content = by.file(
        [by.entry("general.architecture", by.STRING, by.text("zebra"))], [by.tensor("a", [4 << 20])], bytes(16 << 20)
    )
    with loopback.serve(loopback.Site(headers={"ETag": f'"{"e" * 40}"'})) as served:
        loopback.add_repo(served, "me/big", {"big-Q4_K_M.gguf": content})
        loopback.add_repo(served, LARGE["qwen3"].repo, {LARGE["qwen3"].file_name: content})
        served.files["/big.gguf"] = content
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


def fetched_bytes(site: loopback.Site) -> int:
    return sum(n for path, n in site.sent.items() if path.endswith(".gguf"))


SAYS = "'zebra' is not supported. All "


@pytest.mark.slow
def test_server_refuses_unsupported_models_before_download(site: loopback.Site) -> None:
    for source in (ModelSource(spec=f"{site.url}/big.gguf"), ModelSource(hf_repo="me/big")):
        with pytest.raises(UnsupportedModel, match=SAYS):
            fetch_model(source, EngineOptions())
    assert fetched_bytes(site) == 2 << 20


@pytest.mark.parametrize(
    "what",
    [["pull", "-hf", "me/big"], ["pull", "hf:me/big"], ["pull", "qwen3"], ["plan", "-m", "hf:me/big"]],
)
def test_commands_refuse_unsupported_models_before_download(
    site: loopback.Site, capsys: pytest.CaptureFixture[str], what: list[str]
) -> None:
    assert cli.main(what) != 0
    output = " ".join(capsys.readouterr().err.split())
    assert SAYS in output
    assert fetched_bytes(site) == 1 << 20


def test_inspect_reports_support(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(make_llama(tmp_path / "a.gguf"))]) == 0
    assert "Its architecture and weight types are supported." in capsys.readouterr().out
    assert cli.main(["inspect", str(make_llama(tmp_path / "b.gguf", n_embd=256, types={"ffn_up": "Q8_K"}))]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "This model is not supported." in output and "'blk.0.ffn_up.weight' is of type Q8_K" in output


@pytest.mark.slow
def test_inspect_reads_only_the_header_of_a_remote_file(
    site: loopback.Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    content = make_llama(tmp_path / "a.gguf", n_embd=256, n_ff=2048, n_layer=2, wtype="F32").read_bytes()
    assert len(content) > 12 << 20
    loopback.add_repo(site, "me/good", {"good-Q8_0.gguf": content})
    site.files["/good.gguf"] = content
    for spec in ("hf:me/good", f"{site.url}/good.gguf", "hf:me/big"):
        site.sent.clear()
        assert cli.main(["inspect", spec]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert fetched_bytes(site) == 1 << 20  # the first read is that large, whatever the size of the header
        if "big" in spec:
            assert "zebra" in out and SAYS in out
        else:
            assert re.search(r"blk\.1\.ffn_down\.weight \S+ 2048 × 256 [\d.]+ MB", out)
            assert "weight types are supported." in out and "MiB of memory with" in out
    assert not list(tmp_path.rglob("*.part")) and not list((tmp_path / "hub").rglob("*.gguf"))


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    room = MachineMemory(free=10 << 20, total=12 << 20, physical=1 << 40)  # a container's limit
    monkeypatch.setattr(supported.limits, "memory", lambda: room)


@pytest.mark.full
@pytest.mark.usefixtures("short_of_memory")
def test_model_larger_than_memory_is_not_downloaded(
    site: loopback.Site, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = make_llama(tmp_path / "a.gguf", n_embd=512, n_ff=4096, n_layer=6).read_bytes()
    small = make_llama(tmp_path / "b.gguf").read_bytes()
    loopback.add_repo(site, "me/good", {"good-Q8_0.gguf": content, "good-Q2_K.gguf": small})
    site.files["/good.gguf"] = content
    for what in (["pull", "hf:me/good:Q8_0"], ["run", "hf:me/good:Q8_0", "-p", "x"], ["pull", f"{site.url}/good.gguf"]):
        site.sent.clear()
        assert cli.main(what) == 1
        output = " ".join(capsys.readouterr().err.split())
        assert re.search(r"not fetched: not enough memory: CPU needs [\d.]+ MiB .* and has 10 MiB free", output)
        assert ("What would fit: hf:me/good:Q2_K (" in output) == ("hf:" in " ".join(what))
        assert "--fit off fetches it all the same" in output
        assert fetched_bytes(site) == 1 << 20  # the first read is that large, whatever the size of the header
    assert cli.main(["plan", "-m", "hf:me/good:Q8_0"]) in (0, 1)  # `plan` measures its devices itself
    assert fetched_bytes(site) == 2 << 20
    assert cli.main(["pull", "hf:me/good:Q8_0", "--fit", "off"]) == 0
    captured = capsys.readouterr()
    assert Path(captured.out.split("\n")[-2]).read_bytes() == content and "not enough memory" in captured.err
    with pytest.raises(NotEnoughMemory, match="is not fetched"):
        LoadedModel.load(f"{site.url}/good.gguf")
    assert cli.main(["pull", "hf:me/good:Q2_K"]) == 0


@pytest.mark.full
def test_memory_estimate_of_a_mixture_includes_bytes_per_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("qwen3moe", "llama"):
        path = make(TINY[name], tmp_path / f"{name}.gguf")
        with GGUFFile.open(path) as file:
            (output,) = memory_estimate(file.header, EngineOptions())
            sizes = weight_sizes(file, load_model(file))
        read = sum(size.read for role, size in sizes.items() if role.part in (ModelPart.LAYER, ModelPart.OUTPUT))
        words = f", of which a token reads {mib(read)}"
        assert cli.main(["plan", "-m", str(path)]) == 0
        out = capsys.readouterr().out
        assert (words in output, words in out) == ((True, True) if name == "qwen3moe" else (False, False))


@pytest.mark.slow
def test_memory_of_workers_counts(
    site: loopback.Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_of_memory: None
) -> None:
    path = make_llama(tmp_path / "a.gguf", n_embd=256, n_ff=2048, n_layer=2, wtype="F32")
    site.files["/m.gguf"] = path.read_bytes()
    source = ModelSource(spec=f"{site.url}/m.gguf")
    worker = SimpleNamespace(close=lambda: None)
    figures = DeviceFigures(name="RPC0[h:1]", local=False, free=1 << 30, total=1 << 30)
    real = supported.backend
    monkeypatch.setattr(
        supported, "backend", lambda name, *given: real(name, *given) if name == "cpu" else SimpleNamespace(
            devices=lambda: [worker])
    )  # fmt: skip
    monkeypatch.setattr(supported, "figures_of", lambda _: figures)
    output: list[str] = []
    header = source.header()
    options = EngineOptions(split=SplitOptions(rpc=("h:1",)), n_ctx=64)
    check_before_fetching(header, options, output.append)
    assert len(output) == 1 and "1,034 MiB are free" in output[0]
    with pytest.raises(NotEnoughMemory, match="CPU needs"):
        check_before_fetching(header, replace(options, split=replace(options.split, n_gpu_layers=0)), output.append)


@pytest.mark.parametrize("name", ["me/big", "qwen3"])
def test_router_refuses_unsupported_downloads(site: loopback.Site, name: str) -> None:
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
    assert events[-1][:2] == ("download_failed", name) and SAYS in events[-1][2]["reason"]
    assert fetched_bytes(site) == 1 << 20
