"""A real model whose sliding-window layers store only the window: the same bits as with every token stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows import feed_sequence
from tiny_models import make_gemma3
from waiting import until

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.cache.prompt_cache import CellReader
from llamado.engine.cache.slot_file import SlotReader, write_slot
from llamado.engine.drafts.drafts import DraftManager
from llamado.engine.drafts.suffix import Suffix
from llamado.engine.engine import Engine
from llamado.engine.errors import SlotFileError
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.options import EngineOptions
from llamado.engine.request import GenerationParams, Request
from llamado.engine.sampling.params import Sampling
from llamado.gguf.reader import GGUFFile
from llamado.models import load_model
from llamado.models.memory import Handle, Span

from .conftest import OpenModel
from .fake import FakeTokenizer, ask, send
from .test_restore import Cluster

Array = np.ndarray[Any, Any]
Open = Callable[..., ModelRunner]
WINDOW, N = 40, 700
TOKENIZER = FakeTokenizer(dict.fromkeys(range(512), b"x"), eog=())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma3(tmp_path_factory.mktemp("model") / "m.gguf", n_layer=4, n_swa=WINDOW, n_ctx=4096)


@pytest.fixture
def start(open_model: OpenModel, model: Path) -> Open:
    return partial(open_model, model, n_cells=4096, n_sequences=3, max_batch=32)


@pytest.fixture(scope="module")
def kept(keep_model: OpenModel, model: Path) -> Open:
    return partial(keep_model, model, n_cells=4096, n_sequences=3, max_batch=32)


@pytest.fixture(scope="module")
def right(kept: Open) -> Array:
    """Return the logits of every token, with every token stored."""
    runner = kept(whole=True)
    assert not runner.memory.has_tails
    return feed(runner, allocated(runner), text(), 32)


def text(seed: int = 0, n: int = N) -> list[int]:
    return np.random.default_rng(seed).integers(6, 500, n).tolist()


def allocated(runner: ModelRunner) -> Handle:
    handle = runner.memory.allocate(N)
    assert handle is not None
    return handle


def feed(runner: ModelRunner, handle: Handle, tokens: list[int], chunk: int) -> Array:
    """Return the logits of every token that continues a sequence."""
    found = []
    for at in range(0, len(tokens), chunk):
        part = np.array(tokens[at : at + chunk], np.int32)
        rows = np.arange(part.size, dtype=np.int32)
        found.append(runner.start(part, [Span(handle, handle.used, part.size)], rows).result(60).copy())
        handle.used += part.size
    return np.concatenate(found)


def same(a: Array, b: Array) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


def test_memory_size_is_that_of_the_windows(kept: Open) -> None:
    runner, whole = kept(), kept(whole=True)
    windowed, everything = runner.memory, whole.memory
    sizes = [windowed.layer_bytes(i) for i in range(4)]
    assert sizes[1] == sizes[3] == everything.layer_bytes(1) and sizes[0] == sizes[2] < sizes[1] // 2
    assert sizes[0] == everything.layer_bytes(0) * windowed[0].part.n_rows // 4096
    assert sum(tensor.nbytes for tensor in windowed.tensors) < sum(tensor.nbytes for tensor in everything.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [32, 7])
def test_long_prompt_gives_the_same_bits(kept: Open, right: Array, chunk: int) -> None:
    runner = kept()
    assert same(feed(runner, allocated(runner), text(), chunk), right)


@pytest.mark.full
def test_decoding_among_other_sequences_gives_the_same_bits(kept: Open, right: Array) -> None:
    runner = kept()
    ours, other = allocated(runner), allocated(runner)
    feed(runner, ours, text()[:100], 32)
    for at in range(100, N):
        tokens = np.array([text(1)[at % 50], text()[at]], np.int32)
        rows = runner.start(tokens, [Span(other, other.used, 1), Span(ours, at, 1)], np.array([1], np.int32)).result(60)
        assert same(rows[0], right[at])
        ours.used += 1
        other.used += 1


@pytest.mark.slow
def test_rewinding_gives_the_same_bits(kept: Open, right: Array) -> None:
    runner = kept()
    memory, handle = runner.memory, allocated(runner)
    memory.mark(handle, 299)
    feed(runner, handle, text()[:650], 32)
    assert not memory.rewind(handle, 200) and handle.used == 650, "those rows are gone"
    assert memory.reach(handle, 300) == 299
    for n in (640, 299, 0, 40):
        assert memory.rewind(handle, n)
        feed(runner, handle, text(2)[:40], 32)  # rows of wrong tokens must not affect later ones
        assert memory.rewind(handle, n)
        assert same(feed(runner, handle, text()[n : n + 60], 20), right[n : n + 60])


def test_shared_prefix_gives_the_same_bits(kept: Open, right: Array) -> None:
    runner = kept()
    memory, src = runner.memory, allocated(runner)
    memory.mark(src, 299)
    feed(runner, src, text(), 32)
    with pytest.raises(ValueError, match="cannot go back"):
        memory.fork(src, 280, 450)
    for n, stop in ((299, 450), (N - 1, N)):
        forked = memory.fork(src, n, N)
        assert forked is not None and forked.used == n and memory.n_shared >= n - 64
        assert same(feed(runner, forked, text()[n:stop], 32), right[n:stop])
        memory.free(forked)


@pytest.mark.slow
def test_saved_rows_restore_in_another_runner(start: Open, kept: Open, right: Array) -> None:
    runner, other = start(), kept()
    memory, handle = runner.memory, allocated(runner)
    memory.mark(handle, 350)
    feed(runner, handle, text()[:600], 32)
    assert memory.tails(handle) == [350, 600]
    for n in (350, 600):
        tail, cells = memory.read_tail(handle, n), memory.read(handle, 0, n)
        assert memory.is_valid(cells, n) and memory.is_valid_tail(tail, n) and tail.size == memory.tail_bytes(n)
        copied = allocated(other)
        feed(other, copied, text(3)[:450], 32)
        other.memory.rewind(copied, 0)
        other.memory.write_tail(copied, n, tail)
        other.memory.write(copied, n, cells)
        assert same(feed(other, copied, text()[n : n + 60], 32), right[n : n + 60])
        other.memory.free(copied)


def req(prompt: list[int], n: int = 6, **options: Any) -> Request:
    return Request(
        prompt=prompt,
        params=GenerationParams(n_predict=n, sampling=Sampling(temperature=0.0, seed=1), n_probs=3, **options),
    )


@pytest.mark.slow
def test_answers_equal_those_with_every_token_stored(
    kept: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several turns, a repeated question, another ending, another slot, an evicted sequence, and a saved slot."""
    monkeypatch.setattr(CellReader, "pays", lambda self, handle, pace: True)
    head, other = text(4, 450), text(5, 100)
    asked = [
        req(head[:400], 60), req(head[:400]), req([*head[:400], *other]), req(head[:300] + other), req(head, id_slot=1),
        req(other, id_slot=0), req(other[:50], id_slot=1), req(text(6, 80), id_slot=2), req([*head[:400], 7, 8, 9]),
    ]  # fmt: skip
    found = []
    for whole in (False, True):
        with closing(
            Engine(
                kept(whole=whole),
                TOKENIZER,
                EngineOptions(n_slots=3, n_ctx=1024, cache_ram=-1),
                drafts=DraftManager([Suffix()]),
            )
        ) as engine:
            answers = [ask(engine, request) for request in asked]
            engine.save_slot(answers[-1].id_slot, tmp_path / "a").result(60)
            engine.restore_slot((answers[-1].id_slot + 1) % 3, tmp_path / "a").result(60)
            answers.append(ask(engine, req([*head[:400], 7, 8, 9, *answers[-1].tokens, 5])))
            assert answers[-1].n_cached >= 408
            found.append([(answer.tokens, answer.probs) for answer in answers])
    assert found[0] == found[1]


@pytest.mark.slow
def test_losing_a_worker_does_not_change_answers(model: Path, kept: Open, jit: Jit) -> None:
    """Windows lie on two devices, and one fails twice during the answers."""
    prompts = [text(7, 500), text(8, 200), text(7, 500)[:450] + text(9, 20)]
    runner = kept(whole=True)
    engine = Engine(runner, TOKENIZER, EngineOptions(n_slots=3, n_ctx=1024))
    right = [ask(engine, req(prompt, 40)).tokens for prompt in prompts]
    assert right[0][0] == int(np.argmax(feed_sequence(kept(), prompts[0])))
    engine.close()
    cluster = Cluster(model, Placement((1, 1, 2, 2), 2), jit, n_cells=4096, n_sequences=3, max_batch=32)
    assert cluster.forward.memory.has_tails
    engine = Engine(cluster.forward, TOKENIZER, EngineOptions(n_slots=3, n_ctx=1024))
    try:
        clients = [send(engine, req(prompt, 40)) for prompt in prompts]
        for n in (3, 20):
            until(lambda n=n: any(len(client.tokens) > n for client in clients))  # type: ignore[misc]
            cluster.device(1).die()
        assert [client.result.tokens for client in clients] == right
    finally:
        engine.close()
        cluster.forward.close()
        cluster.file.close()


@pytest.mark.full
def test_real_gemma_rewinds_with_the_same_bits(gemma3_path: Path, jit: Jit) -> None:
    """A prompt of three windows, in chunks, then another ending from a checkpoint."""
    tokens = np.random.default_rng(0).integers(6, 200_000, 1600).tolist()
    rows = []
    for whole in (False, True):
        file = GGUFFile.open(gemma3_path)
        runner = ModelRunner(
            file, load_model(file), [CpuDevice(2, jit=jit)], RunnerOptions(n_cells=8192, max_batch=256, whole=whole)
        )
        memory, handle = runner.memory, runner.memory.allocate(1700)
        assert handle is not None and memory.has_tails is not whole
        memory.mark(handle, 1500)
        found = []
        for part in (tokens, tokens[:50]):
            for at in range(0, len(part), 256):
                batch = np.array(part[at : at + 256], np.int32)
                last = np.array([batch.size - 1], np.int32)
                span = Span(handle, handle.used, batch.size)
                found.append(runner.start(batch, [span], last).result(300).tobytes())
                handle.used += batch.size
            assert memory.rewind(handle, 1500)
        rows.append(found)
        runner.close()
        file.close()
    assert rows[0] == rows[1]


def test_slot_file_with_invalid_window_values_is_refused(kept: Open, tmp_path: Path) -> None:
    runner = kept()
    memory, handle = runner.memory, allocated(runner)
    feed(runner, handle, text()[:100], 32)
    tail, cells = memory.read_tail(handle, 100).copy(), memory.read(handle, 0, 100)
    for infinite in (False, True):
        if infinite:
            tail[-2:] = [0, 0x7C]
        write_slot(tmp_path / "a", runner.cell_kind(), np.array(text()[:100], np.int32), tail, [cells], 100)
        if not infinite:
            with SlotReader(tmp_path / "a", runner.cell_kind, n_ctx=4096, n_vocab=512) as file:
                assert np.array_equal(file.tail, tail)
            continue
        with pytest.raises(SlotFileError, match="NaN or infinity"):
            SlotReader(tmp_path / "a", runner.cell_kind, n_ctx=4096, n_vocab=512)
