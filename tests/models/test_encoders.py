"""One numerics for every encoder: the vectors of a text have the same bits in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny import TINY, each_architecture, make

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.gguf.reader import GGUFFile
from llamado.models import ARCHITECTURES, Output, load_model
from llamado.models.batch import Batch
from llamado.models.encoder import Encoder

ENCODERS = [name for name, tiny in TINY.items() if issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)]
TEXTS = [np.random.default_rng(n).integers(3, 300, n).astype(np.int32) for n in (90, 1, 33, 70)]


@pytest.fixture(scope="module")
def jit() -> Jit:
    return Jit()


@pytest.fixture(params=["F32", "Q8_0"])
def runner(request: pytest.FixtureRequest, name: str, jit: Jit, tmp_path: Path) -> Iterator[ModelRunner]:
    with GGUFFile.open(make(TINY[name], tmp_path / "m.gguf", wtype=request.param)) as file:
        devices = [CpuDevice(2, jit=jit)]
        options = {"n_cells": 512, "max_batch": 200, "whole": True, "output": Output.HIDDEN}
        runner = ModelRunner(file, load_model(file), devices, RunnerOptions(**options))
        yield runner
        runner.close()


def vectors(runner: ModelRunner, texts: list[NDArray[np.int32]]) -> list[NDArray[np.float32]]:
    """Return the vectors of all tokens of texts that share a batch."""
    placed = runner.memory.pack([len(text) for text in texts])
    tokens = np.concatenate(texts)
    rows = runner.submit(Batch(placed.positions, np.arange(len(tokens)), placed.rows, tokens)).result(60).copy()
    return np.split(rows, np.cumsum([len(text) for text in texts])[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", each_architecture(ENCODERS))
def test_the_same_bits_in_any_batch(runner: ModelRunner) -> None:
    alone = [vectors(runner, [text])[0] for text in TEXTS]
    assert all(np.isfinite(rows).all() and rows.std() > 0.1 for rows in alone)
    for together, right in zip(vectors(runner, TEXTS), alone, strict=True):
        assert together.tobytes() == right.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", each_architecture(ENCODERS))
def test_the_first_token_sees_the_last(runner: ModelRunner, name: str) -> None:
    text = TEXTS[0].copy()
    before = vectors(runner, [text])[0]
    text[-1] = (text[-1] + 1) % 300
    causal = name == "t5encoder-v1.1"  # the default if the file has no key
    assert np.array_equal(before[0], vectors(runner, [text])[0][0]) == causal


@pytest.mark.full
@pytest.mark.parametrize("name", ["bert-ranks", "bert-ranks-by-means", "modern-bert-ranks"])
def test_scores_have_the_same_bits_in_any_request(name: str, tmp_path: Path) -> None:
    options = EngineOptions(n_ctx=256, n_threads=2, n_slots=1, reranking=True)
    with LoadedModel.load(make(TINY[name], tmp_path / "m.gguf"), options) as loaded:
        assert loaded.embedder is not None
        texts = [text.tolist() for text in TEXTS]
        alone = [loaded.embedder.submit([text]).result(60)[0].vectors for text in texts]
        together = [found.vectors for found in loaded.embedder.submit(texts).result(60)]
    assert [one.tobytes() for one in alone] == [one.tobytes() for one in together]
    assert np.isfinite(alone).all() and np.std(alone) > 0.02
