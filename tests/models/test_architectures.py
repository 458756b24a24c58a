"""Every architecture held to the first law: a token's logits have the same bits however its text is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import TINY, make
from tiny.spec import N_VOCAB

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.models import ARCHITECTURES, load_model
from llamado.models.encoder import Encoder
from llamado.models.memory import Handle, Span

Array = np.ndarray[Any, Any]

N = 150
TOKENS = np.random.default_rng(5).integers(3, 300, N).astype(np.int32)


QUICK = {"deepseek2", "gemma3", "gpt2", "granitehybrid", "llama", "qwen3moe"}
"""Latent, windowed, learned and rotated positions, states, experts: what most of the others are made of."""
FIRST: dict[str, str] = {}
"""The architecture that stands for all of its class."""
for _tiny in TINY.values():
    FIRST.setdefault(ARCHITECTURES[_tiny.architecture].place, _tiny.architecture)
# Those of a large vocabulary have the graph of others, and take long to write.
NAMES = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow])
    for name, tiny in TINY.items()
    if not issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)
    and tiny.n_vocab == N_VOCAB
    and FIRST[ARCHITECTURES[tiny.architecture].place] == tiny.architecture
]
# Files of few layers are made of parts that deeper ones hold with quantised weights, too.
CASES = [pytest.param(*case.values, "F32", marks=case.marks) for case in NAMES]
CASES += [
    pytest.param(name, "Q8_0", marks=pytest.mark.slow)
    for name in (case.values[0] for case in NAMES)
    if TINY[str(name)].n_layer >= 4
]


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


def read(runner: ModelRunner, handle: Handle, sizes: list[int]) -> Array:
    """Logits of all tokens that a sequence goes on with, read in batches of these sizes."""
    found = []
    for n in sizes:
        part = TOKENS[handle.used : handle.used + n]
        rows = np.arange(part.size, dtype=np.int32)
        spans = [Span(handle, handle.used, part.size, before=TOKENS[: handle.used].tolist())]
        found.append(runner.start(part, spans, rows).result(60).copy())
        handle.used += part.size
    return np.concatenate(found)


def begin(runner: ModelRunner) -> Handle:
    handle = runner.memory.allocate(N)
    assert handle is not None
    return handle


@pytest.fixture
def runner(name: str, wtype: str, jit: Jit, tmp_path: Path) -> Iterator[ModelRunner]:
    with GGUFFile.open(make(TINY[name], tmp_path / "m.gguf", wtype=wtype)) as file:
        model = load_model(file)
        runner = ModelRunner(file, model, [CpuDevice(2, jit=jit)], n_cells=1024, n_sequences=3, max_batch=160)
        yield runner
        runner.close()


@pytest.mark.parametrize(("name", "wtype"), CASES)
def test_the_same_bits_however_it_is_read(runner: ModelRunner) -> None:
    """At once, in batches of odd sizes, token by token, from the middle on again."""
    memory, handle = runner.memory, begin(runner)
    right = read(runner, handle, [N])
    assert np.isfinite(right).all() and right.std() > 0.1
    memory.free(handle)
    for sizes in ([64, 1, 37, 48], [7] * 21 + [3]):
        handle = begin(runner)
        assert read(runner, handle, sizes).tobytes() == right.tobytes(), sizes
        memory.free(handle)
    handle = begin(runner)
    assert read(runner, handle, [120] + [1] * 30)[120:].tobytes() == right[120:].tobytes()
    back = memory.reach(handle, 120)
    assert memory.rewind(handle, back)
    assert read(runner, handle, [150 - back]).tobytes() == right[back:].tobytes()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wtype"), CASES)
def test_the_same_bits_among_others(runner: ModelRunner) -> None:
    """Three sequences in one batch, in an order of their own."""
    alone = begin(runner)
    right = read(runner, alone, [80, *[1] * 12])
    runner.memory.free(alone)
    handles = [begin(runner) for _ in range(3)]
    for handle, n in zip(handles, (30, 80, 20), strict=True):
        read(runner, handle, [n])
    for sizes in [(5, 1, 9)] * 2 + [(1, 1, 1)] * 10:
        spans = [
            Span(handles[i], handles[i].used, n, before=TOKENS[: handles[i].used].tolist())
            for i, n in zip((2, 1, 0), sizes, strict=True)
        ]
        part = np.concatenate([TOKENS[span.handle.used : span.handle.used + span.n] for span in spans])
        found = runner.start(part, spans, np.array([sizes[0]], np.int32)).result(60).copy()
        assert found[0].tobytes() == right[handles[1].used].tobytes()
        for span in spans:
            span.handle.used += span.n


@pytest.mark.parametrize(("name", "wtype"), CASES)
def test_the_same_bits_where_a_beginning_is_shared(runner: ModelRunner) -> None:
    """Sequences that go on apart from what they begin with; between the two lies what is no number."""
    memory, first = runner.memory, begin(runner)
    memory.mark(first, 100)
    right = read(runner, first, [N])
    forks = [forked for forked in (memory.fork(first, 100, N), memory.fork(first, 100, N)) if forked is not None]
    for sizes in [(3, 9), (1, 1), (20, 1)]:
        spans = [
            Span(handle, handle.used, n, before=TOKENS[: handle.used].tolist())
            for handle, n in zip(forks, sizes, strict=True)
        ]
        part = np.concatenate([TOKENS[span.first : span.first + span.n] for span in spans])
        found = runner.start(part, spans, np.arange(part.size, dtype=np.int32)).result(60).copy()
        places = [span.first + i for span in spans for i in range(span.n)]
        assert found.tobytes() == right[places].tobytes()
        for span in spans:
            span.handle.used += span.n
    for forked in forks:
        memory.free(forked)
    wall = memory.allocate(64)
    assert wall is not None
    memory.write(wall, 64, np.full(64 * memory.token_bytes, 0xFF, np.uint8))
    for sizes in ([50], [7, 1, 1, 41]):
        forked = memory.fork(first, 100, N)
        assert forked is not None
        assert memory.n_shared == 100 // memory.block * memory.block
        assert read(runner, forked, sizes).tobytes() == right[100:].tobytes(), sizes
        memory.free(forked)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_two_devices(name: str, jit: Jit, tmp_path: Path) -> None:
    """Layers on two devices; those that share keys and values with earlier ones on another than these, too."""
    found = []
    with GGUFFile.open(make(TINY[name], tmp_path / "m.gguf")) as file:
        model = load_model(file)
        n = model.hparams.n_layer
        for cut in (n, n // 2, n - 1):
            placement = Placement((0,) * cut + (1,) * (n - cut), 1 if cut < n else 0)
            devices = [CpuDevice(1, jit=jit) for _ in range(2)]
            runner = ModelRunner(file, model, devices, placement, n_cells=512, n_sequences=1, max_batch=64)
            found.append(read(runner, begin(runner), [50, 1, 1, 7]).tobytes())
            runner.close()
    assert found[0] == found[1] == found[2]


def test_every_architecture_has_a_small_file() -> None:
    assert {tiny.architecture for tiny in TINY.values()} == set(ARCHITECTURES)
