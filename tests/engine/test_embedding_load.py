"""Memory that a model for embeddings gets at load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from minilm import make_bert
from tiny_models import make_llama

from llamado.devices.device import Device
from llamado.devices.split.measure import figures_of
from llamado.devices.split.placement import DeviceFigures, NotEnoughMemory
from llamado.engine import loaded_model as loading
from llamado.engine.embedding import load as embedding_loading
from llamado.engine.forward.fitting import MemoryRequest, sizes_for
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions, FitOptions
from llamado.gguf.types import TensorType
from llamado.models import Pooling

OPTIONS = EngineOptions(n_threads=1, n_batch=64, embeddings=True)

LEAST = FitOptions().least_context


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with one item, the machine's free memory in bytes, for tests to change."""
    free = [1 << 40]

    def figures(device: Device) -> DeviceFigures:
        return replace(figures_of(device), free=free[0], total=1 << 40)

    monkeypatch.setattr(loading, "figures_of", figures)
    monkeypatch.setattr(embedding_loading, "figures_of", figures)
    return free


def test_encoder_larger_than_memory_is_refused(tmp_path: Path, memory: list[int]) -> None:
    path = make_bert(tmp_path / "encoder.gguf")
    with LoadedModel.load(path, OPTIONS) as found:
        assert found.embedder is not None and found.embedder.submit([[5, 6]]).result()[0].n_tokens == 2
    memory[0] = 1 << 16
    with pytest.raises(NotEnoughMemory, match="CPU needs"):
        LoadedModel.load(path, OPTIONS)


@pytest.mark.slow
def test_embedder_gets_the_memory_that_answers_leave(
    tmp_path: Path, memory: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Texts are limited to fewer tokens if the cells of answers and of texts do not fit together."""
    path = make_llama(tmp_path / "m.gguf", n_ctx=4 * LEAST, n_layer=8)
    cells = 4 * LEAST
    with LoadedModel.load(path, OPTIONS) as both:
        assert both.embedder is not None and both.embedder.n_ctx == cells
        wanted = MemoryRequest(cells, 1, True, OPTIONS.max_batch, TensorType.F16, TensorType.F16)
        sizes = sizes_for(both.file, both.model, wanted, cells)
    assert not caplog.records
    memory[0] = sizes.weights + 2 * (sum(sizes.kv) + sizes.compute + sizes.head_compute) - sum(sizes.kv) // 2
    with LoadedModel.load(path, OPTIONS) as short:
        assert short.engine.n_ctx == cells
        assert short.embedder is not None and LEAST <= short.embedder.n_ctx < cells
    assert "the context is cut" in caplog.text


@pytest.mark.slow
def test_without_embeddings_there_is_no_embedder(tmp_path: Path) -> None:
    path = make_llama(tmp_path / "m.gguf", n_ctx=256)
    with LoadedModel.load(path, replace(OPTIONS, embeddings=False)) as found:
        assert found.embedder is None
    with LoadedModel.load(path, replace(OPTIONS, embeddings=False, reranking=True)) as found:
        assert found.embedder is not None and found.embedder.pooling is Pooling.RANK
