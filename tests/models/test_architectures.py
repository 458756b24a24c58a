"""One numerics for every architecture: the logits of a token have the same bits in any batch."""

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
"""Architectures of the fast run."""
SIMILAR = {"gpt-oss", "falcon-h1", "mamba2"}
"""Representative architectures with the memory of quick ones: windows, or states of Mamba."""
FIRST: dict[str, str] = {}
"""First architecture of each class, by the class's path."""
for _tiny in TINY.values():
    FIRST.setdefault(ARCHITECTURES[_tiny.architecture].path, _tiny.architecture)
# Models with a large vocabulary or many equal layers have the graph of another one, and are slow.
NAMES = [
    pytest.param(
        name, marks=() if name in QUICK else pytest.mark.slow if name in REPRESENTATIVE - SIMILAR else pytest.mark.full
    )
    for name, tiny in TINY.items()
    if not issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)
    and tiny.n_vocab == N_VOCAB
    and tiny.variant != "27b"
    and FIRST[ARCHITECTURES[tiny.architecture].path] == tiny.architecture
]


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


def run(runner: ModelRunner, parts: list[tuple[Handle, int]], outputs: Array | None = None) -> Array:
    """Read the next tokens of sequences in one batch, and return the logits of `outputs` (default: all rows)."""
    spans = [Span(handle, handle.used, n, before=TOKENS[: handle.used].tolist()) for handle, n in parts]
    tokens = np.concatenate([TOKENS[span.first : span.first + span.n] for span in spans])
    wanted = np.arange(tokens.size, dtype=np.int32) if outputs is None else outputs
    found = runner.start(tokens, spans, wanted).result(60).copy()
    for handle, n in parts:
        handle.used += n
    return found


def read(runner: ModelRunner, handle: Handle, sizes: list[int]) -> Array:
    """Return the logits of the sequence's next tokens, read in batches of these sizes."""
    return np.concatenate([run(runner, [(handle, n)]) for n in sizes])


def allocate(runner: ModelRunner) -> Handle:
    handle = runner.memory.allocate(N)
    assert handle is not None
    return handle


# Few different sizes, because building the graph of each size is slow.
ODD = [64, 1, 64, 21]
SMALL = [21, 6] * 5 + [1] * 15


def half_quantized(name: str, path: Path) -> Path:
    """Make an architecture's file; the first half of its layers is quantized, if that is more than one."""
    half = TINY[name].n_layer // 2
    return make(TINY[name], path, wtypes=("Q8_0",) * half if half > 1 else ())


@pytest.fixture(scope="module", params=NAMES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GGUFFile]:
    path = half_quantized(request.param, tmp_path_factory.mktemp("architecture") / "m.gguf")
    with GGUFFile.open(path) as file:
        yield file
    path.unlink()


@pytest.fixture(scope="module")
def opened(file: GGUFFile, jit: Jit) -> Iterator[ModelRunner]:
    """Share a runner and its graphs among the tests of an architecture."""
    runner = ModelRunner(
        file, load_model(file), [CpuDevice(2, jit=jit)], RunnerOptions(n_cells=1024, n_sequences=3, max_batch=160)
    )
    yield runner
    runner.close()


@pytest.fixture
def runner(opened: ModelRunner) -> ModelRunner:
    """Fill the memory with other numbers and, in every second row, NaN (0xFF).

    Rows of another test must not be found, and rows that were not written must not be used. MiniMax-M3 gets no NaN:
    it searches the maximum of a block's scores after masking, which does not remove NaN.
    """
    opened.memory.clear()
    filler = 0x3C if isinstance(opened.model, MinimaxM3Model) else 0xFF
    for part in opened.memory.parts:
        spans = [RowSpan(tensor, 0, part.n_rows) for tensor in part.tensors]
        opened.rows.write_rows(spans, [_rows(span.n, span.tensor.nb[1], filler) for span in spans])
    return opened


def _rows(n: int, size: int, every_second: int) -> Array:
    rows = np.full((n, size), 0x3C, np.uint8)
    rows[::2] = every_second
    return rows.reshape(-1)


@pytest.mark.slow
def test_the_same_bits_in_any_batches(runner: ModelRunner) -> None:
    """Read the text at once, in odd batches, token by token, and again from the middle."""
    memory, handle = runner.memory, allocate(runner)
    right = read(runner, handle, [N])
    assert np.isfinite(right).all() and right.std() > 0.1
    memory.free(handle)
    handle = allocate(runner)
    assert read(runner, handle, ODD).tobytes() == right.tobytes()
    memory.free(handle)
    handle = allocate(runner)
    assert read(runner, handle, SMALL).tobytes() == right.tobytes()
    back = memory.reach(handle, 120)
    assert memory.rewind(handle, back)
    rest = N - back
    assert read(runner, handle, [*[21] * (rest // 21), *[1] * (rest % 21)]).tobytes() == right[back:].tobytes()


@pytest.mark.slow
def test_the_same_bits_beside_other_sequences(runner: ModelRunner) -> None:
    """Read three sequences in one batch."""
    alone = allocate(runner)
    right = read(runner, alone, [N])
    runner.memory.free(alone)
    handles = [allocate(runner) for _ in range(3)]
    for handle, before in zip(handles, ([21, 6], [64, 21], [21]), strict=True):
        read(runner, handle, before)
    for sizes in [(5, 1, 9)] * 2 + [(1, 1, 1)] * 10:
        found = run(
            runner, [(handles[i], n) for i, n in zip((2, 1, 0), sizes, strict=True)], np.array([sizes[0]], np.int32)
        )
        assert found[0].tobytes() == right[handles[1].used - sizes[1]].tobytes()


def test_the_same_bits_with_a_shared_prefix(runner: ModelRunner) -> None:
    """The rows of the sequences are apart from those of the prefix, with NaN between them."""
    memory, first = runner.memory, allocate(runner)
    memory.mark(first, 100)
    right = read(runner, first, [N])
    forks = [forked for forked in (memory.fork(first, 100, N), memory.fork(first, 100, N)) if forked is not None]
    for sizes in [(3, 9), (1, 1), (20, 1)]:
        places = [handle.used + i for handle, n in zip(forks, sizes, strict=True) for i in range(n)]
        assert run(runner, list(zip(forks, sizes, strict=True))).tobytes() == right[places].tobytes()
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
def test_the_same_bits_on_several_devices(file: GGUFFile, runner: ModelRunner, jit: Jit) -> None:
    """Split the layers in the middle and before the last, which may share an earlier layer's keys and values."""
    right = read(runner, allocate(runner), [64]).tobytes()
    n = runner.model.hparams.n_layer
    placement = Placement((0,) * (n // 2) + (1,) * (n - 1 - n // 2) + (2,), 2)
    devices = [CpuDevice(1, jit=jit) for _ in range(3)]
    divided = ModelRunner(
        file, runner.model, devices, RunnerOptions(n_cells=512, n_sequences=1, max_batch=64), placement
    )
    assert read(divided, allocate(divided), [62, 1, 1]).tobytes() == right
    divided.close()


def test_every_architecture_has_a_small_file() -> None:
    assert {tiny.architecture for tiny in TINY.values()} == set(ARCHITECTURES)
