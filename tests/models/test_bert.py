"""The bert architecture: its graph against an encoder in numpy, and the errors of invalid files."""

from __future__ import annotations

import re
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
    """Return the rows of all tokens of texts that share a batch."""
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


def test_scores_of_a_classifier(tmp_path: Path) -> None:
    path = make_bert(tmp_path / "m.gguf", classifier=True, n_scores=3, pooling=gguf.PoolingType.RANK)
    text, w = [2, 10, 20, 3], weights_of(path)
    (found,) = run(path, [text], Output.SCORES)
    x = np.tanh(encode(path, text, 4) @ w["cls.weight"].T + w["cls.bias"])
    np.testing.assert_allclose(found, x @ w["cls.output.weight"].T + w["cls.output.bias"], atol=2e-5)


def test_outputs_and_their_widths(tmp_path: Path) -> None:
    with GGUFFile.open(make_bert(tmp_path / "m.gguf", classifier=True, n_scores=3)) as file:
        model = load_model(file)
        assert (model.hparams.causal, model.hparams.pooling, model.generates) == (False, Pooling.MEAN, False)
        assert (model.width(Output.HIDDEN), model.width(Output.SCORES)) == (64, 3)
        with pytest.raises(UnsupportedModel, match="--embeddings"):
            model.build(BatchShape(1, 1, 256), model.memory(MemoryOptions(n_cells=256)))
    with GGUFFile.open(make_bert(tmp_path / "n.gguf", pooling=None)) as file:
        assert load_model(file).hparams.pooling is None
        # Without a classifier, llama.cpp uses the first element of the hidden state as the score.
        assert load_model(file).width(Output.SCORES) == 64


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("bert.pooling_type", 9, UnsupportedModel),
        ("tokenizer.ggml.token_type_count", 0, InvalidModel),
        ("bert.attention.layer_norm_epsilon", float("nan"), InvalidModel),
    ],
)
def test_errors_name_the_key(tmp_path: Path, key: str, value: Any, error: type[LlamadoError]) -> None:
    with GGUFFile.open(make_bert(tmp_path / "m.gguf")) as file:
        file.metadata = file.metadata.with_values({key: value})
        with pytest.raises(error, match=re.escape(key)):
            load_model(file)
