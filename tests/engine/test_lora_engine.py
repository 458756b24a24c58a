"""Requests with different LoRA adapters run concurrently: the same bits as alone, fair turns, and no shared cells."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_files import make_adapter
from rows import start_at
from tiers import first_of
from tiny_models import make_gemma3, make_llama

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.embedding.embedder import Embedder
from llamado.engine.engine import Engine
from llamado.engine.errors import EngineError, InvalidRequest, SlotFileError
from llamado.engine.forward.contract import as_scales
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.forward.sizes import model_sizes
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.lora_scales import DefaultScales
from llamado.engine.options import EngineOptions
from llamado.gguf.reader import GGUFFile
from llamado.models import InvalidAdapter, Output, Pooling, load_adapters, load_model
from llamado.models.memory import MemoryOptions

from .fake import FakeForward, FakeTokenizer, ask, new_engine, req, send, settled
from .test_restore import MortalDevice

Array = np.ndarray[Any, Any]
Make = Callable[..., tuple[Engine, FakeForward]]
Scale = dict[int, float]
SCALES: tuple[Scale, ...] = ({0: 0.0}, {0: 1.0}, {0: 0.5}, {1: 1.0}, {0: 1.0, 1: 0.25})
PROMPT = [1 + i * 7 % 96 for i in range(120)]


@pytest.fixture
def make(exits: ExitStack) -> Make:
    def build(n_cells: int = 4096, **kw: Any) -> tuple[Engine, FakeForward]:
        forward = FakeForward(n_cells)
        engine = exits.enter_context(
            closing(new_engine(forward, FakeTokenizer(), **{"n_slots": 4, "lora": (0.0, 0.0), **kw}))
        )
        return engine, forward

    return build


# --- on the forward pass that shows every mistake ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("cache_ram", [0, 1])
def test_concurrent_adapters_answer_as_alone(make: Make, cache_ram: int) -> None:
    """Shared prefixes, conversations that return, few cells, draft tokens: no request uses another's cells."""
    rng = random.Random(3)
    asked = []
    for _ in range(60):
        n = rng.choice((20, 70, 110))
        prompt = PROMPT[:n] + [rng.randrange(1, 97) for _ in range(rng.randrange(12))]
        asked.append(req(prompt, rng.randrange(1, 20), lora=rng.choice(SCALES)))
    alone, _ = make(n_slots=1, cache_ram=0)
    expected = []
    for request in asked:
        expected.append(ask(alone, replace(request, params=replace(request.params, cache_prompt=False))).tokens)
    engine, _ = make(1024, cache_ram=cache_ram, drafts=DraftManager([Suffix()]))
    clients = [send(engine, request) for request in asked]
    assert [client.result.tokens for client in clients] == expected
    assert sum(client.result.n_cached for client in clients) > 500, "common prefixes are shared"
    settled(engine)


def test_cells_of_other_scales_are_not_reused(make: Make) -> None:
    engine, _ = make(n_slots=1)
    assert ask(engine, req(PROMPT)).n_cached == 0
    assert ask(engine, req(PROMPT)).n_cached == 119
    assert ask(engine, req(PROMPT, lora={0: 1.0})).n_cached == 0
    assert ask(engine, req(PROMPT, lora={0: 1.0, 1: 0.0})).n_cached == 119, "0 equals an omitted adapter"
    assert ask(engine, req(PROMPT, lora={0: 1.0 + 1e-12})).n_cached == 119, "the same in float32"
    assert ask(engine, req(PROMPT, lora={7: 1.0})).n_cached == 0, "no adapter again"


def test_other_slots_cells_of_other_scales_are_not_reused(make: Make) -> None:
    engine, forward = make()
    for i, scales in enumerate(SCALES[:3]):
        assert ask(engine, req(PROMPT, lora=scales, id_slot=i)).n_cached == 0
    assert ask(engine, req(PROMPT, lora=SCALES[1], id_slot=3)).n_cached == 119, "from slot 1"
    assert forward.copies


def test_prompt_cache_is_keyed_by_scales(make: Make) -> None:
    engine, forward = make(n_slots=1, cache_ram=1)
    first = ask(engine, req(PROMPT, lora={0: 1.0})).tokens
    ask(engine, req(PROMPT, lora={1: 1.0}))
    ask(engine, req(PROMPT))
    assert not forward.writes
    again = ask(engine, req(PROMPT, lora={0: 1.0}))
    assert (again.tokens, again.n_cached) == (first, 119) and forward.writes


def test_set_lora_changes_the_default_scales(make: Make) -> None:
    engine, _ = make(lora=(0.3, 0.0))
    assert engine.lora == (float(np.float32(0.3)), 0.0)
    first = ask(engine, req(PROMPT)).tokens
    assert ask(engine, req(PROMPT, lora={0: 0.3})).tokens == first
    engine.set_lora({1: 2.0, 5: 1.0})
    assert engine.lora == (0.0, 2.0)
    second = ask(engine, req(PROMPT))
    assert second.n_cached == 0 and second.tokens == ask(engine, req(PROMPT, lora={1: 2.0})).tokens != first
    engine.set_lora({})
    assert engine.lora == (0.0, 0.0)
    assert ask(engine, req(PROMPT)).tokens not in (first, second.tokens)
    for wrong in (1e39, float("nan"), float("inf")):
        with pytest.raises(InvalidRequest, match="float32"):
            engine.set_lora({0: wrong})
        with pytest.raises(InvalidRequest, match="float32"):
            engine.submit(req(PROMPT, lora={0: wrong}), lambda event: None)
    assert engine.lora == (0.0, 0.0)


def test_request_keeps_the_scales_of_its_submission(make: Make) -> None:
    engine, forward = make(n_slots=1)
    gate = threading.Event()
    forward.before = lambda n: gate.wait() and None
    first, second = send(engine, req(PROMPT[:9])), send(engine, req(PROMPT[:7]))
    engine.set_lora({0: 1.0})
    third = send(engine, req(PROMPT[:7]))
    gate.set()
    forward.before = None
    assert second.result.tokens != third.result.tokens == ask(engine, req(PROMPT[:7])).tokens
    assert first.result.tokens == ask(engine, req(PROMPT[:9], lora={0: 0.0})).tokens


def test_groups_with_different_scales_take_turns(make: Make) -> None:
    """While three groups generate, none waits longer than one step of each other group."""
    engine, forward = make(n_slots=6)
    gate = threading.Event()
    forward.before = lambda n: gate.wait() and None
    clients = [send(engine, req([1 + i], 30, lora=SCALES[i % 3])) for i in range(6)]
    gate.set()
    for client in clients:
        client.wait()
    turns = forward.scales
    assert len(set(turns)) == 3
    for i in range(3, len(turns) - 12):
        assert len(set(turns[i : i + 3])) == 3, turns[i - 3 : i + 6]


def test_new_requests_do_not_starve_older_ones(make: Make) -> None:
    """One long answer runs against a stream of short ones, each with its own scales."""
    engine, forward = make(n_slots=2)
    long = send(engine, req([5], 40))
    seen = 0
    for i in range(1, 200):
        ask(engine, req([6], 1, lora={0: float(i)}))
        seen += 1
        if long.over.is_set():
            break
    assert long.over.is_set() and seen < 60
    assert len(forward.scales) >= 40


def test_long_prompts_do_not_stall_other_groups(make: Make) -> None:
    """A prompt with other scales is evaluated in chunks, with a step of the answer between them."""
    engine, forward = make(8192, prefill_chunk=16)
    gate = threading.Event()
    forward.before = lambda n: gate.wait() and None
    writing = send(engine, req([5], 100))
    reading = send(engine, req(PROMPT * 4, 1, lora={0: 1.0}))
    gate.set()
    reading.wait()
    writing.wait()
    sizes = [size for size, scales in zip(forward.sizes, forward.scales, strict=True) if scales]
    assert max(sizes[2:]) <= 16 and sum(sizes) == 480


def test_saved_slots_record_their_scales(make: Make, tmp_path: Path) -> None:
    engine, _ = make()
    path = tmp_path / "a"
    answer = ask(engine, req(PROMPT, lora={0: 0.5}, id_slot=0)).tokens
    sequence = PROMPT + answer[:-1]
    expected = ask(engine, req([*sequence, 5], lora={0: 0.5})).tokens
    engine.save_slot(0, path).result(60)
    other, forward = make()
    done = other.restore_slot(2, path).result(60)
    assert done.n_bytes == path.stat().st_size and done.n_tokens >= len(sequence)
    assert ask(other, req([*sequence, 5], id_slot=2)).n_cached == 0, "it was saved with other scales"
    other.restore_slot(2, path).result(60)
    again = ask(other, req([*sequence, 5], lora={0: 0.5}, id_slot=2))
    assert (again.tokens, again.n_cached) == (expected, len(sequence))

    for n in (0, 1, 3):
        few, _ = make(lora=(0.0,) * n)
        with pytest.raises(SlotFileError, match=f"saved with 2 LoRA adapters; there are {n}"):
            few.restore_slot(0, path).result(60)
    whole = path.read_bytes()
    for at in (76, 80, 84, 88, 92):
        path.write_bytes(whole[:at] + b"\x7f" + whole[at + 1 :])
        with pytest.raises(SlotFileError):
            other.restore_slot(0, path).result(60)
    forward.model = b"n" * 32
    path.write_bytes(whole)
    with pytest.raises(SlotFileError, match="another model or other LoRA adapters"):
        other.restore_slot(0, path).result(60)


# --- on real models ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=first_of([make_llama, make_gemma3], ids=["llama", "gemma3"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = request.param(tmp_path_factory.mktemp("model") / "m.gguf", n_embd=64, n_ff=96, n_layer=4)
    return path


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[Path]:
    parts = ("attn_k", "attn_output", "ffn_gate", "ffn_up")
    return [
        make_adapter(model.with_name("a.gguf"), model, size=0.3),
        make_adapter(model.with_name("b.gguf"), model, parts=parts, rank=5, seed=1, size=0.3, type="F16"),
    ]


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, 250, n).tolist()


def feed(forward: ModelRunner, tokens: list[int], scales: tuple[float, ...] = (), chunk: int = 16) -> Array:
    """Return the logits of every token of a sequence."""
    found = []
    for at in range(0, len(tokens), chunk):
        part = np.array(tokens[at : at + chunk], np.int32)
        rows = np.arange(len(part), dtype=np.int32)
        found.append(start_at(forward, part, at + rows, np.zeros(len(part)), rows, scales=scales).result(60).copy())
    return np.concatenate(found)


def opened(model: Path, adapters: list[Path], devices: list[Any], placement: Placement | None = None, **kw: Any) -> Any:
    file = GGUFFile.open(model)
    found = load_model(file)
    load_adapters(found, adapters)
    return ModelRunner(
        file, found, devices, RunnerOptions(**{"n_cells": 1024, "max_batch": 64, "whole": True, **kw}), placement
    )


FEW = ((), (1.0, 0.0), (0.5, 0.0), (1.0, 0.5))


@pytest.mark.slow
def test_real_models_answer_with_concurrent_adapters_as_alone(model: Path, adapters: list[Path], jit: Jit) -> None:
    """Invariant 1: with other adapters in flight, a request has exactly the probabilities it has alone."""
    rng = random.Random(1)
    start = text(30)
    asked = [
        req(start[: rng.randrange(4, 30)] + text(rng.randrange(9), seed), 6, n_probs=3, lora=dict(enumerate(scales)))
        for seed in range(2)
        for scales in ((0.0, 0.0), *FEW[1:])
    ]
    forward = opened(model, adapters, [CpuDevice(2, jit=jit)])
    tokenizer = FakeTokenizer(dict.fromkeys(range(600), b"x"), eog=())
    alone = []
    for request in asked:
        engine = Engine(forward, tokenizer, EngineOptions(n_ctx=512), scales=DefaultScales((0.0, 0.0)))
        alone.append(ask(engine, request).probs)
        engine.close()
    engine = Engine(
        forward, tokenizer, EngineOptions(n_slots=4, n_ctx=512, cache_ram=16), scales=DefaultScales((0.0, 0.0))
    )
    rng.shuffle(order := list(range(len(asked))))
    clients = {i: send(engine, asked[i]) for i in order}
    assert [clients[i].result.probs for i in range(len(asked))] == alone
    assert len({probs[0][0].logprob for probs in alone}) > 6, "the adapters change answers"
    engine.close()
    forward.close()


@pytest.mark.slow
def test_split_model_with_adapters_gives_the_same_bits(model: Path, adapters: list[Path], jit: Jit) -> None:
    """Two devices give the same bits; adapters lie with their weights, and are restored with a lost device."""
    tokens = text(40)
    whole = opened(model, adapters, [CpuDevice(2, jit=jit)])
    right = [feed(whole, tokens, scales) for scales in FEW]
    assert len({rows.tobytes() for rows in right}) == len(FEW)
    whole.close()
    devices = [MortalDevice("RPC1", jit), MortalDevice("RPC2", jit)]
    forward = opened(
        model,
        adapters,
        [CpuDevice(1, jit=jit), *devices],
        Placement((1, 1, 2, 2), 2),
        reconnect=lambda lost: MortalDevice(lost.name, jit),
    )
    for scales, rows in zip(FEW, right, strict=True):
        assert feed(forward, tokens, scales, chunk=7).tobytes() == rows.tobytes()
    for number, device in enumerate(devices):
        added = [name for name in device.loaded if ".lora_" in name]
        layers = {int(name.split(".")[1]) for name in added}
        assert layers == ({0, 1}, {2, 3})[number] and len(added) == 2 * 2 * 7
    devices[0].die()
    forward.recovery.restore(False)
    back = forward.devices[1]
    assert isinstance(back, MortalDevice) and sorted(back.loaded) == sorted(devices[0].loaded)
    for scales, rows in zip(FEW, right, strict=True):
        assert feed(forward, tokens, scales).tobytes() == rows.tobytes()
    forward.close()


@pytest.mark.slow
def test_adapters_lie_with_overridden_weights(model: Path, adapters: list[Path], jit: Jit) -> None:
    tokens = text(20)
    whole = opened(model, adapters, [CpuDevice(1, jit=jit)])
    right = feed(whole, tokens, (1.0, 0.5))
    whole.close()
    elsewhere = ("blk.1.ffn_down.weight", "blk.2.attn_k.weight", "blk.3.ffn_up.weight")
    devices = [MortalDevice("RPC1", jit), MortalDevice("RPC2", jit)]
    overrides = ((elsewhere[0], 2), (elsewhere[1], 1), (elsewhere[2], 1))
    forward = opened(
        model, adapters, [CpuDevice(1, jit=jit), *devices], Placement((1, 1, 2, 2), 2, overrides=overrides)
    )
    assert feed(forward, tokens, (1.0, 0.5)).tobytes() == right.tobytes()
    for device in devices:
        loaded = set(device.loaded)
        added = {name for name in loaded if ".lora_" in name}
        assert {name.partition(".lora_")[0] for name in added} <= loaded
    forward.close()


def test_sizes_include_the_adapters(model: Path, adapters: list[Path]) -> None:
    with GGUFFile.open(model) as file:
        found = load_model(file)
        plain = model_sizes(file, found, MemoryOptions(n_cells=256))
        with_adapters = load_adapters(found, adapters)
        sizes = model_sizes(file, found, MemoryOptions(n_cells=256))
        more = sum(tensor.nbytes for adapter in with_adapters for tensor in adapter.tensors)
        assert sum(sizes.layers) - sum(plain.layers) == more > 0
        for adapter in with_adapters:
            adapter.file.close()


def test_cell_kinds_depend_on_adapters_and_scales(model: Path, adapters: list[Path], jit: Jit) -> None:
    """Other scales, or another adapter with the same scale, change the cells; adapters without effect do not."""

    def kinds(paths: list[Path]) -> list[bytes]:
        forward = opened(model, paths, [CpuDevice(1, jit=jit)])
        found = [forward.cell_kind(scales) for scales in FEW[:3]]
        forward.close()
        assert [kind.scales for kind in found] == list(FEW[:3])
        return [kind.model for kind in found]

    first, second = kinds(adapters), kinds([adapters[1], adapters[0]])
    assert first[0] == second[0] == kinds([])[0] and len({*first, *second}) == 5


def test_scales_are_rounded_to_float32() -> None:
    assert as_scales([0.1, 0]) == (float(np.float32(0.1)), 0.0) and as_scales([0, 0.0]) == as_scales([]) == ()


@pytest.mark.slow
def test_adapters_load_with_their_initial_scales(model: Path, adapters: list[Path]) -> None:
    prompt = text(12)
    options: dict[str, Any] = {"n_ctx": 256, "n_threads": 1}
    with LoadedModel.load(model, EngineOptions(**options)) as plain:
        without = plain.complete(prompt, n_predict=8, temperature=0.0).tokens
    with LoadedModel.load(
        model, EngineOptions(lora=((str(adapters[0]), 1.0), (str(adapters[1]), 0.5)), **options)
    ) as llama:
        assert llama.engine.lora == (1.0, 0.5)
        applied = llama.complete(prompt, n_predict=8, temperature=0.0).tokens
        assert llama.complete(prompt, n_predict=8, temperature=0.0, lora={0: 1.0, 1: 0.5}).tokens == applied
        assert llama.complete(prompt, n_predict=8, temperature=0.0, lora={0: 0.0}).tokens == without
    with LoadedModel.load(model, EngineOptions(lora=((str(adapters[0]), 1.0),), lora_apply=False, **options)) as llama:
        assert llama.engine.lora == (0.0,)
        assert llama.complete(prompt, n_predict=8, temperature=0.0).tokens == without
    with pytest.raises(InvalidAdapter, match=r"'general\.type'"):
        LoadedModel.load(model, EngineOptions(lora=((str(model), 1.0),), **options))
    with pytest.raises(EngineError, match="float32"):
        LoadedModel.load(model, EngineOptions(lora=((str(adapters[0]), float("inf")),), **options))


@pytest.mark.slow
def test_embeddings_use_the_current_scales(model: Path, adapters: list[Path], jit: Jit) -> None:
    """Vectors use the scales set at that time."""
    forward = opened(model, adapters, [CpuDevice(1, jit=jit)], output=Output.HIDDEN)
    scales = DefaultScales((0.0, 0.0))
    embedder = Embedder(forward, pooling=Pooling.LAST, causal=True, n_ctx=256, scales=lambda: scales.now)
    for tokens in (text(9), text(90)):  # the second is longer than a batch
        found = []
        for named in ({}, {0: 1.0}, {0: 1.0, 1: 0.5}):
            scales.set(named)
            found.append(embedder.submit([tokens]).result(60)[0].vectors.tobytes())
            assert found[-1] == feed(forward, tokens, scales.now)[-1].tobytes()
        assert len(set(found)) == 3
    embedder.close()
    forward.close()
