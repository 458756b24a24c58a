"""The runner fills any graph input: embeddings, positions in four sections, inputs that a model defines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import make_gemma3, make_llama

from llamado.devices.cpu.jit import Jit
from llamado.devices.device import DeviceError
from llamado.devices.split.placement import Placement
from llamado.engine.forward.contract import ForwardError
from llamado.engine.forward.runner import ModelRunner
from llamado.ggml.graph import add, get_rows, mul, view_1d
from llamado.ggml.tensor import Tensor
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType as T
from llamado.models import Model, load_model
from llamado.models.architectures.llama.llama import LlamaModel
from llamado.models.batch import Batch, MemoryRows
from llamado.models.forward import Pass
from llamado.models.inputs import Bytes, Input

from .conftest import OpenModel
from .test_restore import TWO, Cluster

Array = np.ndarray[Any, Any]
Open = Callable[..., ModelRunner]

N = 13  # padded to 16 if all is on one device
PLACEMENTS = [None, Placement((0, 1), 1)]


@pytest.fixture
def start(open_model: OpenModel) -> Open:
    def open_(path: Path, load: Callable[[GGUFFile], Model] = load_model, placement: Placement | None = None) -> Any:
        n_devices = 1 if placement is None else 2
        return open_model(path, placement=placement, n_devices=n_devices, load=load, n_cells=512, max_batch=64)

    return open_


def tokens() -> Array:
    return np.random.default_rng(0).integers(6, 200, N).astype(np.int32)


def logits(runner: ModelRunner, **given: Any) -> Array:
    """Return the logits of all tokens of one sequence."""
    cells = np.arange(N, dtype=np.int64)
    rows = MemoryRows(cells, np.zeros(N, np.int64), cells, runner.memory.n_cells)
    batch = Batch(**{"positions": np.arange(N, dtype=np.int32), "outputs": cells, "memory": (rows,), **given})
    return runner.submit(batch).result(60).copy()


def table(runner: ModelRunner) -> Array:
    """Return the token embedding matrix, F32 [n_vocab, n_embd]."""
    return runner.file.data("token_embd.weight").view(np.float32).reshape(-1, runner.model.hparams.n_embd)


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("make", [make_llama, make_gemma3])
def test_embeddings_replace_tokens(
    tmp_path: Path, start: Open, make: Callable[..., Path], placement: Placement | None
) -> None:
    runner = start(make(tmp_path / "m.gguf", wtype="F32"), placement=placement)
    rows = table(runner)[tokens()] * np.float32(runner.model.hparams.embedding_scale)
    found = logits(runner, embeddings=rows)
    np.testing.assert_array_equal(found, logits(runner, tokens=tokens()))
    assert np.abs(found - logits(runner, embeddings=rows[::-1])).max() > 0.01


def test_invalid_embeddings_are_refused(tmp_path: Path, start: Open) -> None:
    runner = start(make_llama(tmp_path / "m.gguf"))
    for wrong in ({}, {"embeddings": np.ones((N, 3), np.float32)}, {"embeddings": np.ones((1, 128), np.float32)}):
        with pytest.raises(ForwardError, match="embeddings of 128 elements"):
            logits(runner, **wrong)


class _PassWithoutRotation:
    """A pass without rotary positions, for models that read positions in another way."""

    def __init__(self, step: Pass) -> None:
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def rotate(self, x: Tensor, *_: Any) -> Tensor:
        return x


class NoPositions(LlamaModel):
    """A llama without position encoding."""

    def _layer(self, step: Pass, layer: int, x: Tensor) -> Tensor | None:
        return super()._layer(_PassWithoutRotation(step), layer, x)  # type: ignore[arg-type]


class FourPositions(NoPositions):
    """Adds a row for each section of a token's position to its embedding."""

    def _embed(self, step: Pass) -> Tensor:
        x = super()._embed(step)
        n = step.shape.n_tokens
        for section in range(4):
            x = add(x, get_rows(self._token_embd, view_1d(step.positions(4), n, 4 * n * section)))
        return x


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_positions_in_four_sections(tmp_path: Path, start: Open, placement: Placement | None) -> None:
    path = make_llama(tmp_path / "m.gguf", wtype="F32")
    runner = start(path, FourPositions, placement)
    plain = start(path, NoPositions, placement)
    rows, text = table(plain), np.arange(N)
    image = np.random.default_rng(1).integers(0, 99, (4, N)).astype(np.int32)
    for given, sections in ((image, image), (text.astype(np.int32), np.stack([text, text, text, 0 * text]))):
        x = rows[tokens()].copy()
        for section in sections:
            x += rows[section]
        found = logits(runner, tokens=tokens(), positions=given)
        np.testing.assert_array_equal(found, logits(plain, embeddings=x))


class Temperatures(Input):
    """F32 [1, n_tokens]: a factor for each token, by its position."""

    def __init__(self, n_tokens: int) -> None:
        super().__init__("a name of the test's own", T.F32, 1, n_tokens)

    def fill(self, batch: Batch) -> Bytes:
        whole = np.zeros(self.ne[1], np.float32)
        whole[: batch.n_tokens] = self.factors(batch.positions)
        return whole.view(np.uint8)

    @staticmethod
    def factors(positions: Array) -> Array:
        return (1 + np.log1p(positions)).astype(np.float32)


class TemperatureModel(LlamaModel):
    def _embed(self, step: Pass) -> Tensor:
        return mul(super()._embed(step), step.input(Temperatures(step.shape.n_tokens)))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_models_can_define_their_own_inputs(tmp_path: Path, start: Open, placement: Placement | None) -> None:
    path = make_llama(tmp_path / "m.gguf", wtype="F32")
    plain = start(path, placement=placement)
    x = table(plain)[tokens()] * Temperatures.factors(np.arange(N))[:, None]
    found = logits(start(path, TemperatureModel, placement), tokens=tokens())
    np.testing.assert_array_equal(found, logits(plain, embeddings=x))


@pytest.fixture
def cluster(tmp_path: Path, jit: Jit) -> Iterator[Cluster]:
    """A model on three devices that can be lost."""
    path = make_llama(tmp_path / "m.gguf", wtype="F32", n_layer=4)
    opened = Cluster(path, TWO, jit, n_cells=512, max_batch=64)
    yield opened
    opened.forward.close()
    opened.file.close()


def test_embeddings_after_a_device_was_lost(cluster: Cluster) -> None:
    runner = cluster.forward
    rows = table(runner)[tokens()]
    expected = logits(runner, embeddings=rows)
    cluster.device(1).die()
    runner.recovery.restore(False)
    np.testing.assert_array_equal(logits(runner, embeddings=rows), expected)


def test_first_embeddings_wait_for_earlier_batches(cluster: Cluster) -> None:
    """Memory for them is still to be allocated, and a device accepts one caller at a time."""
    runner = cluster.forward
    gate = threading.Event()

    def slow(what: str) -> None:
        if what == "submit":
            threading.Timer(0.2, gate.set).start()
            gate.wait(60)

    cluster.device(1).before = slow
    cells = np.arange(N, dtype=np.int64)
    before = Batch(cells, cells, (MemoryRows(cells, 0 * cells, cells, 512),), tokens())
    first = runner.submit(before)
    found = logits(runner, embeddings=table(runner)[tokens()])
    np.testing.assert_array_equal(first.result(60), found)


def test_missing_memory_for_embeddings_is_temporary(cluster: Cluster) -> None:
    runner = cluster.forward
    expected = logits(runner, tokens=tokens())
    rows = table(runner)[tokens()]

    def full(what: str) -> None:
        if what == "place":
            raise DeviceError("RPC1 lacks 12.0 MB")

    cluster.device(1).before = full
    with pytest.raises(DeviceError, match="lacks"):
        logits(runner, embeddings=rows)
    np.testing.assert_array_equal(logits(runner, tokens=tokens()), expected)
    cluster.device(1).before = lambda what: None
    np.testing.assert_array_equal(logits(runner, embeddings=rows), expected)
