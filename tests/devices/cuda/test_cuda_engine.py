"""The whole engine on cards that are emulated: every answer has the CPU's bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiers import first_of
from tiny import REPRESENTATIVE, TINY, make
from tiny_models import make_llama
from waiting import GUARD

from cuda.cards import run
from cuda.fake_libcuda import FakeCard, FakeLibrary
from cuda.fake_machine import IMAGES, install, small_card
from llamado.devices.cuda.device import CudaDevice
from llamado.devices.cuda.driver import Driver
from llamado.devices.split.placement import ALL_LAYERS, SplitOptions
from llamado.engine.engine import Engine
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions, FitOptions, ModelSource
from llamado.engine.scheduler import outage
from llamado.models import ARCHITECTURES
from llamado.models.encoder import Encoder
from llamado.rpc.worker.server import Worker, WorkerOptions

pytestmark = pytest.mark.slow

PROMPTS = ("The quick brown fox", "Hello world! How are", "One two three four five six", "1")
CARDS = SplitOptions(gpus=True, joins=False, n_gpu_layers=ALL_LAYERS)

Bits = tuple[tuple[int, ...], tuple[Any, ...]]
"""Tokens and probabilities of an answer."""


def options(split: SplitOptions | None, **changes: Any) -> EngineOptions:
    base = EngineOptions(
        n_ctx=512, n_slots=4, n_batch=32, n_ubatch=32, n_threads=1, split=split, fit=FitOptions(target=(0,)),
        drafts=DraftOptions(kinds=()),
    )  # fmt: skip
    return replace(base, **changes)


def answer(llama: LoadedModel, prompt: str = PROMPTS[0], n: int = 3, **request: Any) -> Bits:
    found = llama.complete(prompt, n_predict=n, ignore_eos=True, n_probs=2, **{"temperature": 0.0, **request})
    return tuple(found.tokens), tuple((one.token, *one.top) for one in found.probs)


def together(llama: LoadedModel) -> list[Bits]:
    """Return the answers to all prompts at once, sampled."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        numbered = enumerate(PROMPTS)
        return list(pool.map(lambda one: answer(llama, one[1], temperature=0.9, seed=one[0]), numbered))


def chat(llama: LoadedModel) -> tuple[str, str]:
    """Return two answers of a conversation, whose beginning is in the cache for the second one."""
    messages = [{"role": "user", "content": "Hello!"}]
    first = llama.chat(messages, n_predict=2, temperature=0.0, ignore_eos=True)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
    return first, llama.chat(messages, n_predict=2, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    types = {"ffn_down": "Q8_0", "attn_v": "F16", "output": "Q5_0"}
    return make_llama(tmp_path_factory.mktemp("cards") / "m.gguf", n_embd=64, n_ff=64, n_layer=2, types=types)


@pytest.fixture(scope="module")
def plain(path: Path) -> Iterator[LoadedModel]:
    """The model on the CPU."""
    with LoadedModel.load(path, options(None)) as llama:
        yield llama


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Two cards."""
    return install(small_card(), small_card(), replace=monkeypatch.setattr)


@pytest.fixture(scope="module")
def carded(path: Path) -> Iterator[LoadedModel]:
    """The model on a card."""
    with pytest.MonkeyPatch.context() as patched:
        library = install(small_card(), replace=patched.setattr)
        with LoadedModel.load(path, options(CARDS)) as llama:
            yield llama
        assert library.failure is None and library.launches


def placement(llama: LoadedModel) -> list[str]:
    """The names of the devices that the layers and the head are on."""
    assert isinstance(llama.forward, ModelRunner) and llama.forward.placement is not None
    placed = llama.forward.placement
    return [llama.forward.devices[number].name for number in (*placed.layers, placed.head)]


def test_a_conversation(carded: LoadedModel, plain: LoadedModel) -> None:
    assert placement(carded) == ["CUDA0"] * 3
    assert chat(carded) == chat(plain)


def test_requests_in_one_batch(carded: LoadedModel, plain: LoadedModel) -> None:
    right = together(plain)
    assert together(carded) == right
    assert len({tokens for tokens, _ in right}) == len(PROMPTS)


@pytest.mark.full
def test_drafts(path: Path, library: FakeLibrary, plain: LoadedModel) -> None:
    """The draft model is the same model on the CPU, so that every draft is right."""
    drafts = DraftOptions(kinds=("draft-simple",), model=ModelSource(spec=str(path)), most=3)
    with LoadedModel.load(path, options(CARDS, drafts=drafts)) as llama:
        assert answer(llama, n=8)[0] == answer(plain, n=8)[0]
        counters = llama.engine.snapshot().counters
    assert counters.n_drafts and counters.n_accepted >= counters.n_drafted - 3  # the last draft is cut off


@pytest.mark.parametrize("to_the_card", [pytest.param(True, marks=pytest.mark.full), False])
def test_slot_files_of_one_device_on_the_other(
    carded: LoadedModel, plain: LoadedModel, tmp_path: Path, to_the_card: bool
) -> None:
    source, target = (plain, carded) if to_the_card else (carded, plain)
    assert isinstance(source.engine, Engine) and isinstance(target.engine, Engine)
    text = "Once upon a time there was a little model that lived in a test" + " again" * to_the_card
    right = answer(source, text, id_slot=1)
    source.engine.save_slot(1, tmp_path / "slot").result(GUARD)
    assert target.engine.restore_slot(2, tmp_path / "slot").result(GUARD).n_tokens > 20
    found = target.complete(text, n_predict=3, temperature=0.0, ignore_eos=True, id_slot=2)
    assert found.n_cached > 20 and tuple(found.tokens) == right[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("split", "expected"),
    [
        pytest.param(replace(CARDS, n_gpu_layers=2, devices=("CUDA0",)), ["CPU", "CUDA0", "CUDA0"], id="CPU and card"),
        pytest.param(replace(CARDS, tensor_split=(1.0, 1.0)), ["CUDA0", "CUDA0", "CUDA1"], id="two cards"),
    ],
)
def test_layers_on_several_devices(
    path: Path, library: FakeLibrary, plain: LoadedModel, split: SplitOptions, expected: list[str]
) -> None:
    with LoadedModel.load(path, options(split)) as llama:
        assert placement(llama) == expected
        library.launches.clear()  # those of the check of each card
        assert answer(llama) == answer(plain)
        used = {launch.card for launch in library.launches}
    assert used == {int(name[-1]) for name in expected if name != "CPU"}


@contextmanager
def serving(device: CudaDevice) -> Iterator[str]:
    """A worker in this process. Yield its endpoint."""
    worker = Worker([device], WorkerOptions(port=0))
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        yield f"127.0.0.1:{worker.port}"
    finally:
        worker.stop()
        thread.join(GUARD)


def test_a_worker_with_a_card(path: Path, plain: LoadedModel) -> None:
    library = FakeLibrary(run, [small_card()])
    device = CudaDevice(Driver(library).open(0), IMAGES)
    with serving(device) as endpoint:
        split = SplitOptions(rpc=(endpoint,), tensor_split=(1.0,), n_gpu_layers=ALL_LAYERS)
        with LoadedModel.load(path, options(split)) as llama:
            assert answer(llama, n=2) == answer(plain, n=2)
    assert library.launches
    device.close()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "_FIRST_PAUSE", 0.002)
    monkeypatch.setattr(outage, "_LONGEST_PAUSE", 0.02)


@pytest.mark.usefixtures("short_pauses")
@pytest.mark.parametrize("split", first_of([replace(CARDS, n_gpu_layers=2), CARDS], ids=["some layers", "all"]))
def test_the_cpu_continues_when_the_card_falls_off_the_bus(
    path: Path, plain: LoadedModel, monkeypatch: pytest.MonkeyPatch, split: SplitOptions
) -> None:
    library = install(small_card(), replace=monkeypatch.setattr)
    with LoadedModel.load(path, options(split)) as llama:
        before = placement(llama)
        events = llama.events(PROMPTS[0], n_predict=8, temperature=0.0, ignore_eos=True)
        tokens: list[int] = []
        try:
            while True:
                tokens += next(events).tokens
                if len(tokens) == 3:
                    library.lose(0, after=5)
        except StopIteration:
            pass
        assert tuple(tokens) == answer(plain, n=8)[0]
        assert "CUDA0" in before and placement(llama) == ["CPU"] * 3
        assert answer(llama, PROMPTS[1]) == answer(plain, PROMPTS[1])


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(REPRESENTATIVE))
def test_architectures(name: str, tmp_path: Path, library: FakeLibrary) -> None:
    if issubclass(ARCHITECTURES[TINY[name].architecture].load(), Encoder):
        pytest.skip("an encoder generates no text")
    path = make(TINY[name], tmp_path / "m.gguf", wtype="Q8_0")
    with LoadedModel.load(path, options(None)) as llama:
        right = together(llama)
    with LoadedModel.load(path, options(replace(CARDS, devices=("CUDA0",)))) as llama:
        assert "CUDA0" in placement(llama)
        assert together(llama) == right


@pytest.mark.full
def test_smollm2(smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoadedModel.load(smollm2_path, options(None)) as llama:
        right = answer(llama, n=8)
    install(FakeCard(total_bytes=1 << 28), replace=monkeypatch.setattr)
    with LoadedModel.load(smollm2_path, options(replace(CARDS, devices=("CUDA0",)))) as llama:
        assert answer(llama, n=8) == right
