"""Models with latent rows, or with states besides keys and values: the same bits however they are evaluated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from rows import feed_sequence
from tiny import TINY, make
from tiny.deepseek import RANK, ROPE
from tiny.llama import HEAD
from tiny.mamba import N_INNER, N_MIXED, WIDE
from waiting import until

from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.cache.prompt_cache import CellReader
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.forward.sizes import model_sizes
from llamado.engine.options import EngineOptions
from llamado.engine.request import Defaults, Request
from llamado.ggml.ops import Op
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import BatchShape
from llamado.models.architectures.deepseek.deepseek2 import Deepseek2Model
from llamado.models.architectures.granite.granitehybrid import GraniteHybridModel
from llamado.models.memory import Handle, MemoryOptions, Span

from . import test_restore
from .conftest import OpenModel
from .fake import FakeTokenizer, ask, send

Array = np.ndarray[Any, Any]
Open = Callable[..., ModelRunner]
Kind = type[Deepseek2Model] | type[GraniteHybridModel]
N, MAX_BATCH = 260, 16
TOKENIZER = FakeTokenizer(dict.fromkeys(range(512), b"x"), eog=())


@pytest.fixture(scope="module", params=[Deepseek2Model, GraniteHybridModel])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def path(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    return make(TINY["deepseek2" if kind is Deepseek2Model else "granitehybrid"], path)


@pytest.fixture
def start(open_model: OpenModel, kind: Kind, path: Path) -> Open:
    return partial(open_model, path, load=kind, n_cells=1536, n_sequences=3, max_batch=MAX_BATCH)


def text(seed: int = 0, n: int = N) -> list[int]:
    return np.random.default_rng(seed).integers(6, 300, n).tolist()


def allocated(runner: ModelRunner) -> Handle:
    handle = runner.memory.allocate(N)
    assert handle is not None
    return handle


def feed(runner: ModelRunner, handle: Handle, tokens: list[int], chunk: int = MAX_BATCH) -> Array:
    """Return the logits of every token that continues a sequence."""
    found = []
    for at in range(0, len(tokens), chunk):
        part = np.array(tokens[at : at + chunk], np.int32)
        rows = np.arange(part.size, dtype=np.int32)
        found.append(runner.start(part, [Span(handle, handle.used, part.size)], rows).result(60).copy())
        handle.used += part.size
    return np.concatenate(found)


@pytest.fixture(scope="module")
def kept(keep_model: OpenModel, kind: Kind, path: Path) -> Open:
    return partial(keep_model, path, load=kind, n_cells=1536, n_sequences=3, max_batch=MAX_BATCH)


@pytest.fixture(scope="module")
def right(kept: Open) -> Array:
    """Return the logits of every token, evaluated one at a time."""
    runner = kept()
    return feed(runner, allocated(runner), text(), 1)


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def test_memory_sizes_of_cells_and_states(kept: Open, kind: Kind, path: Path) -> None:
    memory = kept().memory
    with GGUFFile.open(path) as file:
        sizes = model_sizes(file, kind(file), MemoryOptions(n_cells=1536, n_sequences=3, max_batch=MAX_BATCH))
    if kind is Deepseek2Model:
        row = (RANK + ROPE) * 2
        assert sizes.kv == (1536 * row,) * 4 and memory.token_bytes == 4 * row and not memory.has_tails
        assert [len(memory[i].tensors) for i in range(4)] == [1] * 4, "no values of their own"
    else:
        state, row = 4 * (3 * N_MIXED + WIDE * N_INNER), 2 * 4 * HEAD
        assert sizes.kv == (3 * 4 * state, 1536 * row) * 2 and memory.token_bytes == 2 * row
        assert memory.has_tails and not memory.supports_drafts and memory.tail_bytes(7) == 2 * state


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [MAX_BATCH, 7, 2])
def test_chunked_prefill_gives_the_same_bits(kept: Open, right: Array, chunk: int) -> None:
    runner = kept()
    assert same(feed(runner, allocated(runner), text(), chunk), right)


@pytest.mark.slow
def test_latent_cache_types(start: Open, kind: Kind) -> None:
    if kind is Deepseek2Model:
        plain, packed = start(type_k=TensorType.F32), start(type_k=TensorType.Q8_0)
        a, b = (feed(runner, allocated(runner), text()[:40]) for runner in (plain, packed))
        # Some tokens select another expert, so all their values differ.
        assert 0 < np.median(np.abs(a - b)) < 0.02 * a.std()


@pytest.mark.slow
def test_other_sequences_do_not_change_bits(kept: Open, right: Array) -> None:
    """Two other sequences decode and prefill while this one is evaluated in pieces of any size."""
    runner, rng = kept(), np.random.default_rng(1)
    handles = [allocated(runner) for _ in range(3)]
    texts, found = [text(), text(1), text(2)], []
    while handles[0].used < 200:
        counts = [int(rng.choice([1, 1, 2, 5])), int(rng.choice([0, 1, 4])), int(rng.choice([0, 1, 3]))]
        counts = [min(n, N - handle.used) for n, handle in zip(counts, handles, strict=True)]
        order = [i for i in rng.permutation(3).tolist() if counts[i]]
        tokens = [t for i in order for t in texts[i][handles[i].used : handles[i].used + counts[i]]]
        spans = [Span(handles[i], handles[i].used, counts[i]) for i in order]
        first = sum(counts[i] for i in order[: order.index(0)])
        outputs = np.arange(first, first + counts[0], dtype=np.int32)
        found.append(runner.start(np.array(tokens, np.int32), spans, outputs).result(60).copy())
        for i in order:
            handles[i].used += counts[i]
    got = np.concatenate(found)
    assert same(got, right[: len(got)])


@pytest.mark.slow
def test_rewinding_gives_the_same_bits(kept: Open, right: Array, kind: Kind) -> None:
    runner = kept()
    memory, handle = runner.memory, allocated(runner)
    memory.mark(handle, 199)
    feed(runner, handle, text())
    assert memory.reach(handle, 220) == (220 if kind is Deepseek2Model else 199)
    assert memory.rewind(handle, 100) == (kind is Deepseek2Model)
    for n in (199, 0) if kind is GraniteHybridModel else (77, 0):
        assert memory.rewind(handle, n)
        feed(runner, handle, text(2)[:20])
        assert memory.rewind(handle, n)
        assert same(feed(runner, handle, text()[n : n + 40], 9), right[n : n + 40])


@pytest.mark.slow
def test_shared_prefix_gives_the_same_bits(kept: Open, right: Array) -> None:
    runner = kept()
    memory, src = runner.memory, allocated(runner)
    memory.mark(src, 199)
    feed(runner, src, text())
    dst = memory.fork(src, 199, 256)
    assert dst is not None
    assert same(feed(runner, dst, text()[199:240]), right[199:240])


@pytest.mark.slow
def test_saved_rows_restore_in_another_runner(start: Open, kept: Open, right: Array) -> None:
    runner, other = start(), kept()
    memory, handle = runner.memory, allocated(runner)
    memory.mark(handle, 150)
    feed(runner, handle, text()[:200])
    for n in memory.tails(handle):
        tail, cells = memory.read_tail(handle, n), memory.read(handle, 0, n)
        assert memory.is_valid(cells, n) and memory.is_valid_tail(tail, n)
        copied = allocated(other)
        other.memory.write_tail(copied, n, tail)
        other.memory.write(copied, n, cells)
        assert same(feed(other, copied, text()[n : n + 40]), right[n : n + 40])
        other.memory.free(copied)


def req(prompt: list[int], n: int = 6, **options: Any) -> Request:
    return Defaults().request(prompt, n_predict=n, temperature=0.0, seed=1, n_probs=3, **options)


@pytest.mark.slow
def test_answers_equal_full_evaluation(
    start: Open, kept: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns, a repeated question, another ending, an evicted sequence, another slot, and a saved slot."""
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)
    runner, plain = start(), kept()
    engine = Engine(
        runner, TOKENIZER, EngineOptions(n_slots=3, n_ctx=512, cache_ram=-1), drafts=DraftManager([Suffix()])
    )
    alone = Engine(plain, TOKENIZER, EngineOptions(n_slots=1, n_ctx=512))
    try:
        prompt, n_cached = text(4, 150), 0

        def check(prompt: list[int], **options: Any) -> list[int]:
            nonlocal n_cached
            right = ask(alone, req(prompt, 12, cache_prompt=False))
            found = ask(engine, req(prompt, 12, **options))
            assert (found.tokens, found.probs) == (right.tokens, right.probs)
            n_cached += found.n_cached
            return found.tokens

        first = check(prompt, id_slot=0)
        check(prompt, id_slot=0)
        check([*prompt, *first, 7, 8, 9], id_slot=0)
        check(prompt[:-1] + text(5, 20), id_slot=1)
        for slot in range(3):
            check(text(6 + slot, 80), id_slot=slot)
        check([*prompt, *first, 7, 8, 9, 10], id_slot=2)
        assert n_cached > 4 * 140
        engine.save_slot(2, tmp_path / "a").result(60)
        engine.restore_slot(1, tmp_path / "a").result(60)
        until(lambda: engine.snapshot().slots[1].n_prompt_tokens > 170)
        check([*prompt, *first, 7, 8, 9, 10], id_slot=1)
    finally:
        engine.close()
        alone.close()


@pytest.mark.slow
def test_losing_a_worker_does_not_change_answers(
    kind: Kind, path: Path, kept: Open, jit: Jit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of each kind lie on two devices, and one fails twice during the answers."""
    prompts = [text(7, 150), text(8, 60), text(7, 150)[:120] + text(9, 20)]
    runner = kept()
    engine = Engine(runner, TOKENIZER, EngineOptions(n_slots=3, n_ctx=512))
    right = [ask(engine, req(prompt, 25, cache_prompt=False)).tokens for prompt in prompts]
    assert right[0][0] == int(np.argmax(feed_sequence(kept(), prompts[0])))
    engine.close()
    monkeypatch.setattr(test_restore, "load_model", kind)
    cluster = test_restore.Cluster(
        path, Placement((1, 1, 2, 2), 2), jit, n_cells=1536, n_sequences=3, max_batch=MAX_BATCH
    )
    engine = Engine(cluster.forward, TOKENIZER, EngineOptions(n_slots=3, n_ctx=512))
    try:
        clients = [send(engine, req(prompt, 25)) for prompt in prompts]
        for n in (3, 12):
            until(lambda n=n: any(len(client.tokens) > n for client in clients))  # type: ignore[misc]
            cluster.device(1).die()
        assert [client.result.tokens for client in clients] == right
    finally:
        engine.close()
        cluster.forward.close()
        cluster.file.close()


@pytest.mark.slow
def test_latent_attention_equals_the_reference(path: Path, kind: Kind, kept: Open, monkeypatch: Any) -> None:
    if kind is Deepseek2Model:
        monkeypatch.setattr(reference, "load_model", kind)
        expected = reference.ReferenceModel(path).logits(text()[:40], outputs=range(40))
        found = feed((runner := kept()), allocated(runner), text()[:40])
        assert np.abs(found - expected).max() < 0.01 * expected.std()


def test_latent_values_are_a_view_of_the_keys(path: Path, kind: Kind) -> None:
    if kind is Deepseek2Model:
        with GGUFFile.open(path) as file:
            model = kind(file)
            memory = model.memory(MemoryOptions(n_cells=512))
            graph = model.build(BatchShape(4, 1, 256), memory)
        attention = [node for node in graph.nodes if node.op is Op.FLASH_ATTN_EXT]
        assert len(attention) == 4
        for layer, node in enumerate(attention):
            k, v = node.source(1), node.source(2)
            assert k is not None and v is not None and k.view_src is v.view_src is memory[layer].tensors[0]
            assert (k.ne[:3], v.ne[:3]) == ((RANK + ROPE, 256, 1), (RANK, 256, 1))
            assert k.view_offs == v.view_offs == 0 and k.nb[1] == v.nb[1] == 2 * (RANK + ROPE)
