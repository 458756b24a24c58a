"""Graphics cards beside the CPU, on stand-ins: use, choice, memory, operations they lack, losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from minilm import make_bert
from stand_in_cards import Card, Cards, install
from tiny_models import make_llama
from waiting import until

from llamado.devices.device import DeviceFull
from llamado.devices.split.placement import ALL_LAYERS, NotEnoughMemory, SplitOptions
from llamado.devices.split.rules import UnknownDevice
from llamado.engine.errors import EngineError
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import DraftOptions, EngineOptions, FitOptions, ModelSource
from llamado.ggml.ops import Op

PROMPT = "The quick brown fox"
LOCAL = SplitOptions(gpus=True, joins=False)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("cards") / "m.gguf", n_embd=64, n_ff=64, n_layer=4, n_vocab=320)


def options(split: SplitOptions | None = LOCAL, **changes: Any) -> EngineOptions:
    base = EngineOptions(n_ctx=256, n_batch=32, n_ubatch=32, n_threads=1, split=split, fit=FitOptions(target=(0,)))
    return replace(base, **changes)


def answer(llama: LoadedModel, n: int = 12, **request: Any) -> list[int]:
    found = llama.complete(PROMPT, n_predict=n, temperature=0.8, seed=4, ignore_eos=True, **request)
    return [*found.tokens]


@pytest.fixture(scope="module")
def right(path: Path) -> list[int]:
    """The answer of the CPU alone."""
    with LoadedModel.load(path, options(None)) as llama:
        return answer(llama)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Cards]:
    monkeypatch.setattr("llamado.devices.accelerators.has_card", lambda kind: False)  # whatever this machine has
    return lambda *sizes, **rest: install(monkeypatch, Cards(sizes or (1 << 30,), **rest))


def placement(llama: LoadedModel) -> list[int]:
    assert isinstance(llama.forward, ModelRunner) and llama.forward.placement is not None
    return [*llama.forward.placement.layers, llama.forward.placement.head]


def test_a_card_takes_everything_and_computes_the_same_bytes(
    path: Path, right: list[int], cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamado")
    machine = cards()
    with LoadedModel.load(path, options()) as llama:
        assert placement(llama) == [1] * 5
        assert answer(llama) == right
        card = machine.card()
        assert card.computed > 10 and len(card.loaded) > 30 and "token_embd.weight" not in card.loaded
        assert llama.engine.snapshot().counters.n_drafts == 0, "drafts hide the latency of networks"
    assert "CUDA0: everything, layers 0 to 3 and the head" in caplog.text
    assert "CPU: the embedding alone: everything fits CUDA0" in caplog.text
    assert all(card.closed for card in machine.opened) and len(machine.opened) == 1


def test_embeddings_beside_answers_stay_with_the_cpu(path: Path, right: list[int], cards: Callable[..., Cards]) -> None:
    machine = cards()
    with LoadedModel.load(path, options(None, embeddings=True)) as llama:
        assert llama.embedder is not None
        vectors = llama.embedder.submit([[5, 6, 7]]).result(60)[0].vectors
    with LoadedModel.load(path, options(embeddings=True)) as llama:
        assert llama.embedder is not None and placement(llama) == [1] * 5 and answer(llama) == right
        assert llama.embedder.submit([[5, 6, 7]]).result(60)[0].vectors.tobytes() == vectors.tobytes()
        assert isinstance(llama.embedder.forward, ModelRunner)
        assert [device.name for device in llama.embedder.forward.devices] == ["CPU"] and len(machine.opened) == 1


@pytest.mark.slow
@pytest.mark.parametrize("away", [False, True], ids=["back", "gone"])
def test_an_encoder_on_a_card_that_is_lost(tmp_path: Path, cards: Callable[..., Cards], away: bool) -> None:
    encoder, texts = make_bert(tmp_path / "e.gguf"), [[5, 6, 7], [8, 9]]
    with LoadedModel.load(encoder, options(None, embeddings=True)) as llama:
        assert llama.embedder is not None
        right = [one.vectors.tobytes() for one in llama.embedder.submit(texts).result(60)]
    machine = cards()
    with LoadedModel.load(encoder, options(embeddings=True)) as llama:
        assert llama.embedder is not None and machine.card().computed == 0
        assert [one.vectors.tobytes() for one in llama.embedder.submit(texts).result(60)] == right
        assert machine.card().computed > 0
        if away:
            machine.away.add("CUDA0")
        machine.before = after(1, Card.die)
        assert [one.vectors.tobytes() for one in llama.embedder.submit(texts).result(60)] == right
        assert [one.vectors.tobytes() for one in llama.embedder.submit(texts).result(60)] == right
        assert (set(placement(llama)) == {0}) == away and len(machine.opened) == 2 - away


@pytest.mark.parametrize(
    ("split", "expected", "opened"),
    [
        (replace(LOCAL, n_gpu_layers=2), [0, 0, 0, 1, 2], ["CUDA0", "CUDA1"]),
        (replace(LOCAL, n_gpu_layers=ALL_LAYERS), [1, 1, 1, 2, 2], ["CUDA0", "CUDA1"]),
        (replace(LOCAL, devices=("CUDA1", "CUDA0")), [2, 2, 2, 1, 1], ["CUDA0", "CUDA1"]),
        (replace(LOCAL, devices=("cuda1",)), [1] * 5, ["CUDA1"]),
        (replace(LOCAL, main_gpu=1), [2] * 5, ["CUDA0", "CUDA1"]),
        (replace(LOCAL, tensor_split=(1, 3)), [1, 1, 2, 2, 2], ["CUDA0", "CUDA1"]),
        (replace(LOCAL, tensor_split=(1, 1, 3)), [1, 2, 0, 0, 0], ["CUDA0", "CUDA1"]),
        (replace(LOCAL, tensor_split=()), [1, 1, 1, 2, 2], ["CUDA0", "CUDA1"]),
    ],
    ids=["-ngl 2", "-ngl all", "order", "one", "-sm none", "-ts", "-ts with the CPU", "-ts memory"],
)
@pytest.mark.slow
def test_the_number_of_layers(
    path: Path,
    right: list[int],
    cards: Callable[..., Cards],
    split: SplitOptions,
    expected: list[int],
    opened: list[str],
) -> None:
    cards(1 << 30, 1 << 30)
    with LoadedModel.load(path, options(split)) as llama:
        assert isinstance(llama.forward, ModelRunner)
        assert [device.name for device in llama.forward.devices] == ["CPU", *opened]
        assert placement(llama) == expected and answer(llama) == right


def test_shares_of_two_cards(path: Path, right: list[int], cards: Callable[..., Cards]) -> None:
    """`--tensor-split 0,1` gives the second card everything."""
    cards(1 << 30, 1 << 30)
    with LoadedModel.load(path, options(replace(LOCAL, tensor_split=(0, 1), n_gpu_layers=35))) as llama:
        assert placement(llama) == [2] * 5 and answer(llama) == right


@pytest.mark.parametrize(
    "split",
    [None, replace(LOCAL, devices=("none",)), replace(LOCAL, devices=("CPU",)), replace(LOCAL, n_gpu_layers=0)],
    ids=["no split", "none", "CPU", "-ngl 0"],
)
def test_the_cpu_alone(path: Path, cards: Callable[..., Cards], split: SplitOptions | None) -> None:
    machine = cards()
    with LoadedModel.load(path, options(split)) as llama:
        assert llama.cluster is None and not machine.opened


def test_flags_without_a_card_give_one_line(
    path: Path, cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture
) -> None:
    cards(problem="there is no driver: install it")
    with LoadedModel.load(path, options(replace(LOCAL, n_gpu_layers=35, given=("-ngl/--gpu-layers",)))) as llama:
        assert llama.cluster is None
    (line,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert line == (
        "-ngl/--gpu-layers: no effect: the model runs on this machine's CPU; CUDA: there is no driver: install it; "
        "--rpc adds workers"
    )
    caplog.clear()
    with LoadedModel.load(path, options()):
        assert not [record for record in caplog.records if record.levelname == "WARNING"], "nothing was asked for"
    with pytest.raises(UnknownDevice, match="no device 'CUDA0'; there is only the CPU: CUDA: there is no driver"):
        LoadedModel.load(path, options(replace(LOCAL, devices=("CUDA0",))))


def test_what_is_refused(path: Path, cards: Callable[..., Cards]) -> None:
    machine = cards()
    with pytest.raises(EngineError, match="-sm/--split-mode row: not supported; use layer or none"):
        LoadedModel.load(path, options(replace(LOCAL, mode="row")))
    with pytest.raises(UnknownDevice, match=r"no device 'CUDA7'; there are CPU, CUDA0 \(see --list-devices\)"):
        LoadedModel.load(path, options(replace(LOCAL, devices=("CUDA0", "CUDA7"))))
    with pytest.raises(UnknownDevice, match="--main-gpu 3: there is no such device, counted from 0 in CUDA0"):
        LoadedModel.load(path, options(replace(LOCAL, main_gpu=3)))
    assert all(card.closed for card in machine.opened) and len(machine.opened) == 3


def sizes(path: Path, cards: Callable[..., Cards]) -> tuple[int, int]:
    """Return the bytes of about a layer with its cache, and those of everything, on a card."""
    cards()
    with LoadedModel.load(path, options()) as llama:
        assert llama.cluster is not None
        memory = llama.cluster.view().devices[1].memory
    return (memory.weights + memory.kv) // 6, memory.weights + memory.kv + memory.compute


def test_a_small_card_takes_the_last_layers(
    path: Path, right: list[int], cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "llamado")
    layer, everything = sizes(path, cards)
    caplog.clear()
    machine = cards(everything - layer)
    with LoadedModel.load(path, options()) as llama:
        found = placement(llama)
        assert found == sorted(found) and 0 < found.count(0) < 4 and answer(llama) == right
        assert machine.card().used <= everything - layer
    assert "CUDA0 has no room for it" in caplog.text and "as much as fits: " in caplog.text
    with pytest.raises(NotEnoughMemory, match=rf"CUDA0 needs .*-ngl {found.count(1)} \(the most that fits\)"):
        LoadedModel.load(path, options(replace(LOCAL, n_gpu_layers=99)))
    with LoadedModel.load(path, options(replace(LOCAL, n_gpu_layers=found.count(1)))) as llama:
        assert placement(llama) == found


def test_layers_with_an_operation_that_a_card_lacks(
    path: Path, right: list[int], cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture
) -> None:
    """Every layer has attention, so that only the head is left for the card."""
    caplog.set_level("INFO", "llamado")
    cards(1 << 30, 1 << 30, lacks={0: {Op.FLASH_ATTN_EXT}})
    with LoadedModel.load(path, options()) as llama:
        assert placement(llama) == [0, 0, 0, 2, 2] and answer(llama) == right
    assert "CUDA0 has no FLASH_ATTN_EXT for F32, which layers 0 to 2 need" in caplog.text


def test_the_cache_stays_with_the_cpu(path: Path, right: list[int], cards: Callable[..., Cards]) -> None:
    machine = cards()
    with LoadedModel.load(path, options(replace(LOCAL, kv_offload=False))) as llama:
        assert placement(llama) == [1] * 5 and answer(llama) == right
        assert not [name for name in machine.card().placed if name.startswith("cache")]
        assert llama.cluster is not None
        here, card = llama.cluster.view().devices
        assert here.memory.kv > 0 == card.memory.kv and here.holds is None


def after(n: int, act: Callable[[Card], None]) -> Callable[[Card, str], None]:
    """Return a `before` that acts on the first card's n-th graph from now on."""
    left = [n]

    def before(card: Card, what: str) -> None:
        if what == "submit" and card.number == 0 and left:
            left[0] -= 1
            if not left[0]:
                left.clear()
                act(card)

    return before


@pytest.mark.slow
def test_a_card_that_is_lost_and_works_again(path: Path, right: list[int], cards: Callable[..., Cards]) -> None:
    machine = cards()
    with LoadedModel.load(path, options()) as llama:
        machine.before = after(4, Card.die)
        assert answer(llama) == right
        first, second = machine.opened
        assert first.lost is not None and second.loaded == first.loaded and placement(llama) == [1] * 5
        assert llama.forward.recovery.away() == ()


@pytest.mark.slow
@pytest.mark.parametrize("n_cards", [1, 2])
def test_layers_of_a_lost_card_move_and_come_back(
    path: Path, right: list[int], cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture, n_cards: int
) -> None:
    """Layers move without a flag, because there is no other machine to wait for."""
    caplog.set_level("INFO", "llamado")
    machine = cards(*[1 << 30] * n_cards)
    with LoadedModel.load(path, options()) as llama:
        before = placement(llama)
        machine.away.add("CUDA0")
        machine.before = after(4, Card.die)
        assert answer(llama) == right
        assert placement(llama) == [0 if n_cards == 1 else 2] * 5, "the CPU, or the other card"
        (away,) = llama.forward.recovery.away()
        assert (away.device, away.why) == ("CUDA0", "the driver does not list it any more")
        assert llama.cluster is not None and llama.cluster.view().devices[1].state == "away"
        assert answer(llama) == right
        machine.away.clear()
        until(lambda: llama.forward.recovery.away() == () and placement(llama) == before)
        assert answer(llama) == right
    assert "device CUDA0 is lost: it has fallen off the bus; answers wait until it is opened again" in caplog.text
    assert "RPC" not in caplog.text


def fill(card: Card) -> None:
    """Let another process take all memory but a half of what the card needs."""
    card.machine.sizes = [card.used // 2, *card.machine.sizes[1:]]
    raise DeviceFull("CUDA0: cannot allocate 4096 bytes")


@pytest.mark.slow
def test_a_card_that_is_full_during_an_answer(
    path: Path, right: list[int], cards: Callable[..., Cards], caplog: pytest.LogCaptureFixture
) -> None:
    machine = cards()
    with LoadedModel.load(path, options()) as llama:
        used = machine.card().used
        machine.before = after(4, fill)
        assert answer(llama) == right
        (away,) = llama.forward.recovery.away()
        assert away.why == "it is out of memory: CUDA0: cannot allocate 4096 bytes" and placement(llama) == [0] * 5
        until(lambda: len(machine.opened) > 2)
        assert placement(llama) == [0] * 5 and not machine.card().loaded, "there is too little memory to come back"
        machine.sizes = [2 * used]
        until(lambda: placement(llama) == [1] * 5)
        assert answer(llama) == right


def test_a_card_that_is_full_while_the_model_loads(path: Path, cards: Callable[..., Cards]) -> None:
    """Estimates can be too low."""
    machine = cards()

    def before(card: Card, what: str) -> None:
        if what == "load":
            raise DeviceFull(f"{card.name}: cannot allocate 4096 bytes")

    machine.before = before
    with pytest.raises(DeviceFull, match="CUDA0: cannot allocate 4096 bytes; -ngl with fewer layers or a larger --fit"):
        LoadedModel.load(path, options())
    assert machine.card().closed


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model."""
    return make_llama(tmp_path_factory.mktemp("small") / "s.gguf", n_embd=32, n_ff=32, n_layer=1, n_vocab=320)


@pytest.mark.slow
def test_a_draft_model_has_the_cards_of_its_target(
    path: Path, small: Path, right: list[int], cards: Callable[..., Cards]
) -> None:
    machine = cards(1 << 30, 1 << 30)
    drafts = DraftOptions(kinds=("draft-simple",), model=ModelSource(spec=str(small)), split=LOCAL)
    with LoadedModel.load(path, options(replace(LOCAL, devices=("CUDA1",)), drafts=drafts)) as llama:
        assert llama.draft is not None and llama.draft.runner.placement is not None
        names = [device.name for device in llama.draft.runner.devices]
        assert names == ["CPU", "CUDA1"] and llama.draft.runner.placement.layers == (1,)
        assert answer(llama) == right
        assert llama.engine.snapshot().counters.n_drafted > 0
        assert llama.cluster is not None
        free = llama.cluster.view().devices[1].memory.free
        assert 0 < (1 << 30) - free < 1 << 20, "the memory of the draft model is left to it"
    for split in (None, replace(LOCAL, devices=("none",))):
        with LoadedModel.load(path, options(split, drafts=drafts)) as llama:
            assert llama.draft is not None and llama.draft.runner.placement is None
    with pytest.raises(UnknownDevice, match="--spec-draft-device CUDA0: the model itself is not on it"):
        chosen = replace(drafts, split=replace(LOCAL, devices=("CUDA0",)))
        LoadedModel.load(path, options(replace(LOCAL, devices=("CUDA1",)), drafts=chosen))
    assert all(card.closed for card in machine.opened)
