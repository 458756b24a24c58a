"""Encoders on a stand-in of a graphics card: its choice, the CPU's bits, and the CPU for a card that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from projectors import spec
from projectors.siglip import GEMMA3
from stand_in_cards import Card, Cards, install
from tiny_models import make_gemma3

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.device import DeviceFull
from llamado.devices.split.placement import SplitOptions
from llamado.devices.split.rules import UnknownDevice
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.media import encoder_runner, load, segments
from llamado.engine.media.accelerator import open_accelerator
from llamado.engine.media.encoder_runner import EncoderRunner
from llamado.engine.media.load import ProjectorFile
from llamado.engine.options import EngineOptions, FitOptions
from llamado.ggml.ops import Op
from llamado.gguf.reader import GGUFFile
from llamado.media.chunks import MediaChunk
from llamado.media.media import Media, MediaKind
from llamado.models.encoders.registry import load_encoders

Array = np.ndarray[Any, Any]
LOCAL = SplitOptions(gpus=True, joins=False)
NO_LAYERS = replace(LOCAL, n_gpu_layers=0)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cards]:
    monkeypatch.setattr("llamado.devices.accelerators.has_card", lambda kind: False)
    return lambda *sizes, **rest: install(monkeypatch, Cards(sizes or (1 << 30,), **rest))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return spec.make(GEMMA3, tmp_path_factory.mktemp("projector") / "mmproj.gguf")


def picture(seed: int = 0) -> Media:
    return Media(MediaKind.IMAGE, np.random.default_rng(seed).integers(0, 256, (40, 30, 3), np.uint8))


def projector(path: Path) -> ProjectorFile:
    file = GGUFFile.open(path)
    return ProjectorFile(file, load_encoders(file), lambda: load_encoders(file))


def runner_of(path: Path, split: SplitOptions | None = LOCAL, device: CpuDevice | None = None) -> EncoderRunner:
    """Load the encoders as a model does, on the card if there is one."""
    found, device = projector(path), device or CpuDevice(1)
    found.open_accelerator(EngineOptions(), split, device)
    return found.load(device, None)


def chunk_of(runner: EncoderRunner, seed: int = 0) -> MediaChunk:
    (chunk,) = (piece for piece in runner.prepare(picture(seed)) if isinstance(piece, MediaChunk))
    return chunk


def encoded(runner: EncoderRunner, seed: int = 0) -> bytes:
    run = runner.begin(chunk_of(runner, seed))
    for _ in range(1000):
        rows = run.advance()
        if rows is not None:
            return rows.tobytes()
    raise AssertionError("it does not end")


@pytest.fixture(scope="module")
def right(path: Path) -> bytes:
    return encoded(runner_of(path, None))


def test_a_card_computes_the_bits_of_the_cpu(
    path: Path, right: bytes, cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamado")
    machine = cards()
    runner = runner_of(path, NO_LAYERS)
    card = machine.card()
    assert {*card.loaded} == {*load_encoders(runner.file).each[0].weights}
    assert runner.accelerated is not None and len(runner.accelerated.graphs) == 1, "it is not warmed up"
    assert encoded(runner) == right and card.computed > 0
    assert runner._here is None, "the weights are on the CPU, too"
    assert "device=CUDA0" in caplog.text
    runner.close()
    assert card.closed


@pytest.mark.parametrize("step", ["submit", "write", "read"])
def test_a_lost_card_leaves_its_work_to_the_cpu(
    path: Path,
    right: bytes,
    step: str,
    cards: Callable[..., Cards],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(segments, "_LEAST_COST", 1e5)
    machine = cards()
    runner = runner_of(path)
    calls = 0

    def lose(card: Card, what: str) -> None:
        nonlocal calls
        calls += what == step
        if calls == 2:
            card.die()

    machine.before = lose
    assert encoded(runner) == right and runner.accelerated is None
    assert (
        "CUDA0 is lost: it has fallen off the bus; pictures and sounds are encoded on the CPU from now" in caplog.text
    )
    assert machine.card().closed
    done = machine.card().computed
    assert encoded(runner) == right and machine.card().computed == done
    runner.close()


@pytest.mark.parametrize("step", ["place", "submit"])
def test_a_full_card_leaves_one_chunk_to_the_cpu(
    path: Path, right: bytes, step: str, cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture
) -> None:
    machine = cards()
    runner = runner_of(path)
    assert runner.accelerated is not None
    runner.accelerated.drop_graphs()
    card, full = machine.card(), True
    used = card.used

    def fail(card: Card, what: str) -> None:
        if full and what == step:
            raise DeviceFull("CUDA0: cannot allocate 5 bytes of 4")

    machine.before = fail
    assert encoded(runner) == right and card.computed == 0
    assert "cannot allocate 5 bytes of 4; this picture or sound is encoded on the CPU" in caplog.text
    assert card.used == used, "the memory of the graph is not released"
    full = False
    assert encoded(runner) == right and card.computed > 0
    runner.close()


def test_an_error_of_the_cpu_behind_a_card_ends_the_encoding(
    path: Path, cards: Callable[..., Cards], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards()
    device = CpuDevice(1)
    runner = runner_of(path, device=device)
    assert runner.accelerated is not None

    def fail(*_: object) -> None:
        raise DeviceFull("no memory")

    monkeypatch.setattr(runner.accelerated.device, "submit", fail)
    monkeypatch.setattr(device, "submit", fail)
    with pytest.raises(DeviceFull, match=r"no memory \(while encoding media on CPU\)"):
        encoded(runner)
    runner.close()


def test_a_card_that_is_full_at_the_start_is_not_used(
    path: Path, right: bytes, cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture
) -> None:
    machine = cards(1000)
    runner = runner_of(path)
    assert runner.accelerated is None and encoded(runner) == right and machine.card().closed
    assert "encoded on the CPU: CUDA0: cannot allocate" in caplog.text


def test_it_returns_to_the_engine_when_time_is_up(
    path: Path, right: bytes, cards: Callable[..., Cards], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "_LEAST_COST", 1)
    monkeypatch.setattr(encoder_runner, "_SECONDS", -1.0)
    machine = cards()
    runner = runner_of(path)
    waits: list[str] = []
    machine.before = lambda card, what: waits.append(what) if what in ("submit", "read") else None
    run = runner.begin(chunk_of(runner))
    assert run.advance() is None
    assert waits == ["submit", "read"], "it does not wait for the segment"
    runner.close()


def chosen(path: Path, split: SplitOptions | None, **options: Any) -> str:
    """Return the name of the device that encodes."""
    with GGUFFile.open(path) as file:
        device = CpuDevice(1)
        found = open_accelerator(EngineOptions(**options), split, load_encoders(file), device.numerics)
        if found is None:
            return "CPU"
        found.close()
        return found.name


def test_the_device_is_the_first_that_the_model_may_use(path: Path, cards: Callable[..., Cards]) -> None:
    machine = cards(1 << 30, 1 << 30)
    assert chosen(path, LOCAL) == chosen(path, NO_LAYERS) == "CUDA0"
    assert chosen(path, replace(LOCAL, devices=("CUDA1", "CUDA0"))) == "CUDA1"
    assert chosen(path, replace(LOCAL, devices=("RPC0", "CUDA1"))) == "CUDA1"
    assert chosen(path, replace(LOCAL, devices=("none",))) == "CPU"
    assert chosen(path, None) == chosen(path, replace(LOCAL, gpus=False)) == "CPU"
    assert chosen(path, LOCAL, mmproj_offload=False) == chosen(path, LOCAL, mmproj_device="none") == "CPU"
    assert chosen(path, replace(LOCAL, devices=("CUDA0",)), mmproj_device="cuda1") == "CUDA1"
    with pytest.raises(UnknownDevice, match="--mmproj-device CUDA2: there is no such accelerator"):
        chosen(path, LOCAL, mmproj_device="CUDA2")
    with pytest.raises(UnknownDevice, match="--mmproj-device RPC0: there is no such accelerator"):
        chosen(path, LOCAL, mmproj_device="RPC0")
    assert all(card.closed for card in machine.opened)
    cards(problem="no driver")
    assert chosen(path, LOCAL) == "CPU"
    with pytest.raises(UnknownDevice, match=r"accelerator of this machine \(CUDA: no driver\)"):
        chosen(path, LOCAL, mmproj_device="CUDA0")


def test_a_card_that_lacks_an_operation_is_not_used(
    path: Path, cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = cards(lacks={0: {Op.FLASH_ATTN_EXT}})
    assert chosen(path, LOCAL) == "CPU" and machine.card().closed
    assert "encoders: pictures and sounds are encoded on the CPU: CUDA0 has no FLASH_ATTN_EXT of F32" in caplog.text
    cards()
    monkeypatch.setattr(Card, "numerics", "other")
    assert chosen(path, LOCAL) == "CPU" and "CUDA0 rounds in other ways" in caplog.text


@pytest.mark.slow
def test_a_model_and_its_encoders_share_a_card(path: Path, tmp_path: Path, cards: Callable[..., Cards]) -> None:
    model = make_gemma3(tmp_path / "text.gguf", n_embd=64, n_layer=2, wtype="F32")
    options = EngineOptions(
        n_ctx=256, n_threads=1, n_slots=1, mmproj=str(path), fit=FitOptions(target=(0,)), mmproj_device=""
    )  # fmt: skip

    def answer(llama: LoadedModel, seed: int) -> list[int]:
        prompt = llama.media_prompt("Look: <__media__>.", [picture(seed)])
        return llama.complete(prompt.tokens, media=prompt.spans, n_predict=8, temperature=0, ignore_eos=True).tokens

    with LoadedModel.load(model, options) as llama:
        alone = [answer(llama, seed) for seed in (1, 2, 3)]
    machine = cards()
    with LoadedModel.load(model, replace(options, split=LOCAL)) as llama:
        assert llama.media is not None and llama.media.accelerated is not None
        encoding = llama.media.accelerated.device
        assert isinstance(encoding, Card) and len(machine.opened) == 2
        assert answer(llama, 1) == alone[0] and encoding.computed > 0
        encoding.die()
        assert [answer(llama, seed) for seed in (2, 3)] == alone[1:]
        assert llama.media.accelerated is None
    assert all(card.closed for card in machine.opened)


def test_memory_of_encoders_on_a_card(path: Path, cards: Callable[..., Cards]) -> None:
    cards()
    found = projector(path)
    assert found.reserve().accelerators == 0
    found.open_accelerator(EngineOptions(), LOCAL, CpuDevice(1))
    needed = found.reserve()
    weights = sum(tensor.nbytes for tensor in found.encoders.each[0].weights.values())
    assert needed.accelerators - needed.cpu == weights > 0
    found.close()


@pytest.mark.slow
@pytest.mark.parametrize("needed", [0, 64 << 20])
def test_the_text_model_leaves_memory_of_the_card_to_the_encoders(
    path: Path, needed: int, tmp_path: Path, cards: Callable[..., Cards], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards(64 << 20)
    monkeypatch.setattr(load, "memory_needed", lambda *_, copied=False: needed if copied else 0)
    model = make_gemma3(tmp_path / "text.gguf", n_embd=64, n_layer=2, wtype="F32")
    options = EngineOptions(n_ctx=256, n_threads=1, mmproj=str(path), split=LOCAL, fit=FitOptions(target=(0,)))
    with LoadedModel.load(model, options) as llama:
        assert isinstance(llama.forward, ModelRunner) and llama.forward.placement is not None
        assert any(llama.forward.placement.layers) == (needed == 0)
        assert llama.media is not None and llama.media.accelerated is not None
