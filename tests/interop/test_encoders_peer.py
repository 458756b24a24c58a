"""Small models that make vectors: those of the real llama.cpp for the same tokens, of each token and of a text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from peer_server import llama_server
from tiny import REPRESENTATIVE, TINY, make

from llamado.engine.embedding.load import pair
from llamado.engine.loaded_model import LoadedModel
from llamado.engine.options import EngineOptions
from llamado.models import ARCHITECTURES
from llamado.models.encoder import Encoder

pytestmark = pytest.mark.interop

LENGTHS = (100, 1, 37)
ENCODERS = [name for name, tiny in TINY.items() if issubclass(ARCHITECTURES[tiny.architecture].load(), Encoder)]


# What comes behind the mean is what would come before it, and a vocabulary's own word on pooling is not asked.
CASES = [*((name, "none") for name in ENCODERS), ("gemma-embedding", "mean")]


@pytest.mark.parametrize(
    ("name", "pooling"),
    [pytest.param(*case, marks=() if case[0] in REPRESENTATIVE else pytest.mark.full) for case in CASES],
)
def test_vectors(peer_bin: Path, tmp_path: Path, name: str, pooling: str) -> None:
    path = make(TINY[name], tmp_path / "m.gguf")
    rng = np.random.default_rng(2)
    texts = [rng.integers(3, 300, n).tolist() for n in LENGTHS]
    options = EngineOptions(n_ctx=256, n_threads=2, n_slots=1, embeddings=True, pooling=pooling)
    with LoadedModel.load(path, options) as loaded:
        assert loaded.embedder is not None
        ours = [found.vectors for found in loaded.embedder.submit(texts).result(60)]
    flags = ["--embeddings", "--pooling", pooling, "-c", "256", "-b", "256", "-ub", "256", "-t", "2", "--no-warmup"]
    with llama_server(peer_bin, path, tmp_path / "server.log", *flags, "-np", "1") as client:
        answer = client.post("/embedding", json={"content": texts, "embd_normalize": -1}).raise_for_status().json()
    for mine, entry in zip(ours, answer, strict=True):
        theirs = np.array(entry["embedding"], np.float32)
        assert mine.shape == theirs.shape and theirs.std() > 0.1
        # A norm or a bias that is left out changes them by tenths. GELU is a table of 16-bit floats there.
        assert np.abs(mine - theirs).mean() < 2e-3 * np.abs(theirs).mean()


@pytest.mark.parametrize(
    "name", ["bert-ranks", "bert-ranks-by-means", "modern-bert-ranks", "jina-bert-v2-code", "qwen3-ranks"]
)
def test_scores(peer_bin: Path, tmp_path: Path, name: str) -> None:
    path = make(TINY[name], tmp_path / "m.gguf")
    query, documents = "Where is Paris?", ["Paris is in France.", "A fox jumps.", "One two three four five six."]
    with LoadedModel.load(path, EngineOptions(n_ctx=256, n_threads=2, n_slots=1, reranking=True)) as loaded:
        assert loaded.embedder is not None
        pairs = [pair(query, document, loaded.tokenizer, "") for document in documents]
        ours = [found.vectors[0, 0] for found in loaded.embedder.submit(pairs).result(60)]
    flags = ["--reranking", "-c", "256", "-b", "256", "-ub", "256", "-t", "2", "--no-warmup", "-np", "1"]
    with llama_server(peer_bin, path, tmp_path / "server.log", *flags) as client:
        answer = client.post("/rerank", json={"query": query, "documents": documents}).raise_for_status().json()
    theirs = {entry["index"]: entry["relevance_score"] for entry in answer["results"]}
    assert np.std(list(theirs.values())) > 0.02
    np.testing.assert_allclose(ours, [theirs[i] for i in range(len(documents))], atol=2e-3)
