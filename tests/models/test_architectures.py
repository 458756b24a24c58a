"""Every architecture held to the first law: a token's logits have the same bits however its text is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import REPRESENTATIVE, TINY, make
from tiny.spec import N_VOCAB

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.models import ARCHITECTURES, load_model
from llamado.models.architectures.minimax.minimax_m3 import MinimaxM3Model
from llamado.models.encoder import Encoder
from llamado.models.memory import Handle, Span
from llamado.models.memory.storage import RowSpan

Array = np.ndarray[Any, Any]

N = 150
TOKENS = np.random.default_rng(5).integers(3, 300, N).astype(np.int32)


QUICK = {"deepseek2", "gemma3", "gpt2", "granitehybrid", "llama", "qwen3moe"}
"""Those of the quickest run."""
FIRST: dict[str, str] = {}
"""The architecture that stands for all of its class."""
for _tiny in TINY.values():
    FIRST.setdefault(ARCHITECTURES[_tiny.architecture].path, _tiny.architecture)
# Those of a large vocabulary, or of many layers of the same kind, have the graph of others, and take long.
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow if name in REPRESENTATIVE else pytest.mark.full)
    for name, tiny in TINY.items()
    if not issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)
    and tiny.n_vocab == N_VOCAB
    and tiny.variant != "27b"
    and FIRST[ARCHITECTURES[tiny.architecture].path] == tiny.architecture
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


# Tests read in batches of the same few sizes: what takes long is the graph of each size.
ODD = [64, 1, 64, 21]
SMALL = [21, 6] * 5 + [1] * 15


def mixed(name: str, path: Path) -> Path:
    """The file of an architecture: the first half of its layers is quantized, if that is a few, the rest are floats."""
    half = TINY[name].n_layer // 2
    return make(TINY[name], path, wtypes=("Q8_0",) * half if half > 1 else ())


@pytest.fixture(scope="module", params=NAMES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    path = mixed(request.param, tmp_path_factory.mktemp("architecture") / "m.gguf")
    with GGUFFile.open(path) as file:
        yield file
    path.unlink()


@pytest.fixture(scope="module")
def opened(file: GGUFFile, jit: Jit) -> Iterator[ModelRunner]:
    """One runner for all tests of an architecture, with the graphs that it has already."""
    runner = ModelRunner(
        file, load_model(file), [CpuDevice(2, jit=jit)], RunnerOptions(n_cells=1024, n_sequences=3, max_batch=160)
    )
    yield runner
    runner.close()


@pytest.fixture
def runner(opened: ModelRunner) -> ModelRunner:
    """With other numbers all over its memory, every second row of them none (0xFF): what was right in another test must
    not be found there, and what nobody wrote must not be computed with. (Of MiniMax-M3's blocks the best score is
    found behind the mask, which keeps out numbers only.)
    """
    opened.memory.clear()
    nobodys = 0x3C if isinstance(opened.model, MinimaxM3Model) else 0xFF
    for part in opened.memory.parts:
        spans = [RowSpan(tensor, 0, part.n_rows) for tensor in part.tensors]
        opened.rows.write_rows(spans, [_rows(span.n, span.tensor.nb[1], nobodys) for span in spans])
    return opened


def _rows(n: int, size: int, every_second: int) -> Array:
    rows = np.full((n, size), 0x3C, np.uint8)
    rows[::2] = every_second
    return rows.reshape(-1)


@pytest.mark.slow
def test_the_same_bits_however_it_is_read(runner: ModelRunner) -> None:
    """At once, in batches of odd sizes, token by token, from the middle on again."""
    memory, handle = runner.memory, begin(runner)
    right = read(runner, handle, [N])
    assert np.isfinite(right).all() and right.std() > 0.1
    memory.free(handle)
    handle = begin(runner)
    assert read(runner, handle, ODD).tobytes() == right.tobytes()
    memory.free(handle)
    handle = begin(runner)
    assert read(runner, handle, SMALL).tobytes() == right.tobytes()
    back = memory.reach(handle, 120)
    assert memory.rewind(handle, back)
    rest = N - back
    assert read(runner, handle, [*[21] * (rest // 21), *[1] * (rest % 21)]).tobytes() == right[back:].tobytes()


@pytest.mark.slow
def test_the_same_bits_among_others(runner: ModelRunner) -> None:
    """Three sequences in one batch, in an order of their own."""
    alone = begin(runner)
    right = read(runner, alone, [N])
    runner.memory.free(alone)
    handles = [begin(runner) for _ in range(3)]
    for handle, before in zip(handles, ([21, 6], [64, 21], [21]), strict=True):
        read(runner, handle, before)
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
    for sizes in ([21, 21, 1, 1, 6], [6, 1, 1, 21, 21]):
        forked = memory.fork(first, 100, N)
        assert forked is not None
        assert memory.n_shared == 100 // memory.block * memory.block
        assert read(runner, forked, sizes).tobytes() == right[100:].tobytes(), sizes
        memory.free(forked)


@pytest.mark.slow
def test_the_same_bits_on_two_devices(file: GGUFFile, runner: ModelRunner, jit: Jit) -> None:
    """Layers on two devices; those that share keys and values with earlier ones on another than these, too."""
    right = read(runner, begin(runner), [64]).tobytes()
    n = runner.model.hparams.n_layer
    for cut in (n // 2, n - 1):
        placement = Placement((0,) * cut + (1,) * (n - cut), 1)
        devices = [CpuDevice(1, jit=jit) for _ in range(2)]
        divided = ModelRunner(
            file, runner.model, devices, RunnerOptions(n_cells=512, n_sequences=1, max_batch=64), placement
        )
        assert read(divided, begin(divided), [62, 1, 1]).tobytes() == right
        divided.close()


def test_every_architecture_has_a_small_file() -> None:
    assert {tiny.architecture for tiny in TINY.values()} == set(ARCHITECTURES)
