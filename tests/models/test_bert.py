"""The bert architecture: its graph, by an encoder written out in numpy, and files it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from minilm import encode, make_bert, weights_of
from reference import ReferenceDevice

from llamado.errors import LlamadoError
from llamado.gguf.reader import GGUFFile
from llamado.gguf.types import TensorType
from llamado.models import BatchShape, InvalidModel, Output, Pooling, UnsupportedModel, load_model
from llamado.models.memory import MemoryOptions

Array = np.ndarray[Any, Any]


def run(path: Path, texts: list[list[int]], output: Output = Output.HIDDEN) -> list[Array]:
    """What the model's graph gives for all tokens of texts that share a batch."""
    with GGUFFile.open(path) as file:
        model = load_model(file)
        kv = model.memory(MemoryOptions(n_cells=256, type_k=TensorType.F32, type_v=TensorType.F32))
        device = ReferenceDevice(np.float64)
        for name, tensor in model.weights.items():
            device.bind(tensor, file.data(name))
        n = sum(map(len, texts))
        graph = model.build(BatchShape(n, n, 256, output), kv)
        starts = np.repeat([64 * i for i in range(len(texts))], [len(t) for t in texts])
        ends = np.repeat([64 * i + len(t) for i, t in enumerate(texts)], [len(t) for t in texts])
        positions = np.concatenate([np.arange(len(t)) for t in texts])
        cells = np.arange(256)
        sees = (cells >= starts[:, None]) & (cells < ends[:, None])
        values: dict[str, Any] = {
            "tokens": np.concatenate([np.array(t) for t in texts]),
            "positions": positions,
            "cells": positions + starts,
            "out_rows": np.arange(n),
            "mask": np.where(sees, 0.0, -np.inf),
        }
        found = device.run(graph, {tensor: values[name] for name, tensor in graph.inputs.items()})[output.value]
    return np.split(np.asarray(found), np.cumsum([len(t) for t in texts])[:-1])


@pytest.mark.slow
@pytest.mark.parametrize("types", [True, False])
def test_hidden_states_are_those_of_the_paper(tmp_path: Path, types: bool) -> None:
    path = make_bert(tmp_path / "m.gguf", types=types)
    texts = [[2, 10, 20, 30, 3], [2, 40, 3], [2, *range(5, 40), 3]]
    for text, found in zip(texts, run(path, texts), strict=True):
        np.testing.assert_allclose(found, encode(path, text, 4), atol=2e-5)


def test_scores(tmp_path: Path) -> None:
    path = make_bert(tmp_path / "m.gguf", classifier=True, n_scores=3, pooling=gguf.PoolingType.RANK)
    text, w = [2, 10, 20, 3], weights_of(path)
    (found,) = run(path, [text], Output.SCORES)
    x = np.tanh(encode(path, text, 4) @ w["cls.weight"].T + w["cls.bias"])
    np.testing.assert_allclose(found, x @ w["cls.output.weight"].T + w["cls.output.bias"], atol=2e-5)


def test_facts(tmp_path: Path) -> None:
    with GGUFFile.open(make_bert(tmp_path / "m.gguf", classifier=True, n_scores=3)) as file:
        model = load_model(file)
        assert (model.hparams.causal, model.hparams.pooling, model.generates) == (False, Pooling.MEAN, False)
        assert (model.width(Output.HIDDEN), model.width(Output.SCORES)) == (64, 3)
        with pytest.raises(UnsupportedModel, match="--embeddings"):
            model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    with GGUFFile.open(make_bert(tmp_path / "n.gguf", pooling=None)) as file:
        assert load_model(file).hparams.pooling is None
        # without a classifier, llama.cpp takes the first number of the hidden state for the score
        assert load_model(file).width(Output.SCORES) == 64


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("bert.pooling_type", 9, UnsupportedModel),
        ("tokenizer.ggml.token_type_count", 0, InvalidModel),
        ("bert.attention.layer_norm_epsilon", float("nan"), InvalidModel),
    ],
)
def test_files_that_cannot_be_run(tmp_path: Path, key: str, value: Any, error: type[LlamadoError]) -> None:
    from test_models import rewrite

    def change(metadata: dict[str, Any], tensors: dict[str, Any]) -> None:
        metadata[key] = value

    path = rewrite(make_bert(tmp_path / "m.gguf"), tmp_path / "bad.gguf", change)
    with GGUFFile.open(path) as file, pytest.raises(error, match=key.replace(".", r"\.")):
        load_model(file)


def test_a_missing_norm_is_named(tmp_path: Path) -> None:
    from test_models import rewrite

    path = make_bert(tmp_path / "m.gguf")
    bad = rewrite(path, tmp_path / "bad.gguf", lambda metadata, tensors: tensors.pop("token_embd_norm.bias"))
    with GGUFFile.open(bad) as file, pytest.raises(InvalidModel, match=r"token_embd_norm\.bias"):
        load_model(file)
