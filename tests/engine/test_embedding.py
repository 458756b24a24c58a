"""Embeddings: equal to the reference encoder, the same bits in any batch, fair turns, limits, cancellation."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from minilm import encode, make_bert, weights_of
from numpy.typing import NDArray
from tiers import chosen
from tiny import TINY
from tiny_models import make_gemma3, make_llama

from llamado.devices.cpu.device import CpuDevice
from llamado.devices.cpu.jit import Jit
from llamado.devices.split.placement import Placement
from llamado.engine.embedding.embedder import Embedder, cells_for
from llamado.engine.embedding.pooling import normalize, pool, required_rows
from llamado.engine.errors import (
    ComputeFailed,
    ContextExceeded,
    EngineClosed,
    InputExceedsContext,
    InputTooLarge,
    InvalidRequest,
    QueueFull,
)
from llamado.engine.forward.options import RunnerOptions
from llamado.engine.forward.runner import ModelRunner
from llamado.gguf.reader import GGUFFile
from llamado.models import Output, Pooling, load_model
from llamado.models.batch import Batch
from llamado.models.memory import KeysValues, Memory, MemoryOptions

Array = NDArray[Any]
Open = Callable[..., Embedder]


@pytest.fixture
def start(jit: Jit) -> Iterator[Open]:
    opened: list[tuple[Embedder, ModelRunner, GGUFFile]] = []

    def open_(
        path: Path,
        pooling: Pooling,
        *,
        max_batch: int = 64,
        n_ctx: int = 128,
        n_threads: int = 2,
        placement: Placement | None = None,
    ) -> Embedder:
        file = GGUFFile.open(path)
        model = load_model(file)
        forward = ModelRunner(
            file,
            model,
            [CpuDevice(n_threads, jit=jit) for _ in (placement.devices if placement is not None else (0,))],
            RunnerOptions(
                n_cells=cells_for(max_batch, n_ctx),
                max_batch=max_batch,
                output=Output.SCORES if pooling is Pooling.RANK else Output.HIDDEN,
            ),
            placement,
        )
        embedder = Embedder(forward, pooling=pooling, causal=model.hparams.causal, n_ctx=n_ctx)
        opened.append((embedder, forward, file))
        return embedder

    yield open_
    for embedder, forward, file in opened:
        embedder.close()
        forward.close()
        file.close()


def some_texts(n: int, longest: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[2, *rng.integers(5, 90, rng.integers(0, longest - 1)).tolist(), 3] for _ in range(n)]


def vectors(embedder: Embedder, texts: list[list[int]]) -> list[Array]:
    return [embedding.vectors for embedding in embedder.submit(texts).result(60)]


# --- what is computed -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", Pooling)
def test_vectors_equal_the_reference_encoder(tmp_path: Path, start: Open, pooling: Pooling) -> None:
    path = make_bert(tmp_path / "m.gguf", classifier=True, n_scores=1)
    texts = some_texts(5, 20)
    w = weights_of(path)
    for text, found in zip(texts, vectors(start(path, pooling), texts), strict=True):
        hidden = encode(path, text, 4)
        head = np.tanh(hidden[:1] @ w["cls.weight"].T + w["cls.bias"]) @ w["cls.output.weight"].T
        expected = {
            Pooling.NONE: hidden,
            Pooling.MEAN: hidden.mean(0, keepdims=True),
            Pooling.CLS: hidden[:1],
            Pooling.LAST: hidden[-1:],
            Pooling.RANK: head + w["cls.output.bias"],
        }[pooling]
        # keys and values are F16 here
        np.testing.assert_allclose(found, expected, atol=5e-3)


def test_classifier_lies_with_the_head_on_several_devices(
    tmp_path: Path, start: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_bert(tmp_path / "m.gguf", classifier=True, n_scores=2)
    texts = some_texts(2, 40, seed=5)
    right = vectors(start(path, Pooling.RANK), texts)
    loaded: list[set[str]] = []
    load = CpuDevice.load

    def loads(self: CpuDevice, weights: Any, *rest: Any) -> Any:
        loaded.append({tensor.name for tensor, _ in weights})
        return load(self, weights, *rest)

    monkeypatch.setattr(CpuDevice, "load", loads)
    several = vectors(start(path, Pooling.RANK, placement=Placement((1, 1), 2)), texts)
    assert all(np.array_equal(one, other) for one, other in zip(several, right, strict=True))
    assert {"cls.weight", "cls.bias", "cls.output.weight", "cls.output.bias"} in loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    chosen(
        itertools.product(["F32", "F16", "Q8_0"], [Pooling.NONE, Pooling.MEAN, Pooling.CLS]),
        [("F32", Pooling.NONE), ("F16", Pooling.MEAN), ("Q8_0", Pooling.CLS)],
        id=lambda case: f"{case[0]}-{case[1].name}",
    ),
)
def test_embedding_bits_do_not_depend_on_the_batch(tmp_path: Path, start: Open, case: tuple[str, Pooling]) -> None:
    wtype, pooling = case
    path = make_bert(tmp_path / "m.gguf", wtype=wtype)
    texts = some_texts(24, 60)
    embedder = start(path, pooling)
    together = vectors(embedder, texts)
    assert embedder.snapshot().counters.n_decode_total < len(texts), "they did not share batches"
    alone = [vectors(embedder, [text])[0] for text in texts]
    backwards = vectors(start(path, pooling, max_batch=128, n_threads=1), texts[::-1])[::-1]
    for one, other, third in zip(together, alone, backwards, strict=True):
        assert one.tobytes() == other.tobytes() == third.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_llama, make_gemma3, partial(tiny.make, TINY["granitehybrid"])])
def test_decoders_compute_embeddings(tmp_path: Path, start: Open, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "m.gguf")
    texts = [[5, 6, 7, 8, 9, 10], [11, 12, 13]]
    single = vectors(start(path, Pooling.NONE), texts)
    last = vectors(start(path, Pooling.LAST), texts)
    mean = vectors(start(path, Pooling.MEAN), texts)
    for tokens, final, average in zip(single, last, mean, strict=True):
        assert tokens[-1:].tobytes() == final.tobytes()
        np.testing.assert_allclose(average, tokens.mean(0, keepdims=True), rtol=1e-5, atol=1e-6)
    # no token attends to later ones
    (prefix,) = vectors(start(path, Pooling.NONE), [texts[0][:3]])
    assert prefix.tobytes() == single[0][:3].tobytes()


@pytest.mark.slow
def test_texts_start_at_block_boundaries(tmp_path: Path, start: Open) -> None:
    """Several texts share a batch in a model that attends to selected blocks of tokens."""
    path = tiny.make(TINY["minimax-m3"], tmp_path / "m.gguf")
    texts = some_texts(3, 200, seed=3)
    embedder = start(path, Pooling.NONE, max_batch=768, n_ctx=256)
    together = vectors(embedder, texts)
    assert embedder.snapshot().counters.n_decode_total == 1, "they share a batch"
    for text, found in zip(texts, together, strict=True):
        assert vectors(embedder, [text])[0].tobytes() == found.tobytes()


def test_last_token_pooling_accepts_texts_longer_than_a_batch(tmp_path: Path, start: Open) -> None:
    path = make_llama(tmp_path / "m.gguf")
    text = np.random.default_rng(1).integers(3, 300, 100).tolist()
    (whole,) = vectors(start(path, Pooling.LAST, max_batch=128), [text])
    (parts,) = vectors(start(path, Pooling.LAST, max_batch=32), [text])
    assert whole.tobytes() == parts.tobytes()


# --- what is refused --------------------------------------------------------------------------------------------------


def test_invalid_texts_are_refused(tmp_path: Path, start: Open) -> None:
    embedder = start(make_bert(tmp_path / "m.gguf"), Pooling.MEAN, max_batch=64, n_ctx=32)
    for text, error in (
        ([], InvalidRequest),
        ([2, 100_000], InvalidRequest),
        ([-1], InvalidRequest),
        ([5] * 33, InputExceedsContext),
        ([5] * 65, InputTooLarge),
    ):
        with pytest.raises(error):
            embedder.submit([[2, 3], text])
    assert len(vectors(embedder, [[5] * 32])) == 1
    with pytest.raises(InputTooLarge, match=r"input \(65 tokens\) is too large .* \(current batch size: 64\)"):
        embedder.submit([[5] * 65])
    decoder = start(make_llama(tmp_path / "d.gguf"), Pooling.LAST, max_batch=16, n_ctx=32)
    with pytest.raises(ContextExceeded):
        decoder.submit([[5] * 32])
    assert embedder.submit([]).result(60) == []


# --- requests in turns ------------------------------------------------------------------------------------------------


class Slow:
    """A forward pass that waits until it is released; every row is its token."""

    n_vocab, max_batch, width = 100, 8, 1
    memory = Memory([KeysValues(32, 32)], MemoryOptions(n_cells=256))

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Semaphore(0)
        self.started = threading.Semaphore(0)
        self.error: Exception | None = None

    def submit(self, batch: Batch, scales: tuple[float, ...] = ()) -> Future[NDArray[np.float32]]:
        tokens = batch.tokens
        assert tokens is not None
        self.batches.append(tokens.tolist())
        self.started.release()
        self.go.acquire()
        future: Future[NDArray[np.float32]] = Future()
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(tokens[batch.outputs].astype(np.float32)[:, None])
        return future


@pytest.fixture
def slow() -> Iterator[tuple[Slow, Embedder]]:
    forward = Slow()
    embedder = Embedder(forward, pooling=Pooling.CLS, causal=False, n_ctx=8, max_requests=3)
    yield forward, embedder
    forward.go.release(1000)
    embedder.close()


def test_requests_take_turns(slow: tuple[Slow, Embedder]) -> None:
    forward, embedder = slow
    embedder.submit([[1] * 8])
    forward.started.acquire(timeout=60)
    many = embedder.submit([[2] * 2, [3] * 2, [4] * 2, [5] * 2, [6] * 2])
    few = embedder.submit([[7] * 2])
    forward.go.release(100)
    assert [float(e.vectors[0, 0]) for e in few.result(60)] == [7.0]
    assert [float(e.vectors[0, 0]) for e in many.result(60)] == [2.0, 3.0, 4.0, 5.0, 6.0]
    assert forward.batches == [[1] * 8, [2, 2, 7, 7, 3, 3, 4, 4], [5, 5, 6, 6]]


def test_full_queue_refuses_requests(slow: tuple[Slow, Embedder]) -> None:
    forward, embedder = slow
    futures = [embedder.submit([[1]]) for _ in range(3)]
    with pytest.raises(QueueFull):
        embedder.submit([[1]])
    forward.go.release(100)
    for future in futures:
        future.result(60)
    assert embedder.submit([[1]]).result(60)


def test_queued_rows_are_bounded(slow: tuple[Slow, Embedder], monkeypatch: pytest.MonkeyPatch) -> None:
    import llamado.engine.embedding.embedder as embedding

    _, embedder = slow
    monkeypatch.setattr(embedding, "_MOST_BYTES", 100)
    monkeypatch.setattr(embedding, "_MOST_AT_ONCE", 80)
    with pytest.raises(InvalidRequest, match="fewer at a time"):
        embedder.submit([[1] * 8, [1] * 8])
    embedder.submit([[1] * 8])
    with pytest.raises(QueueFull):
        embedder.submit([[1] * 8])


def test_cancelled_requests_free_the_queue(slow: tuple[Slow, Embedder]) -> None:
    forward, embedder = slow
    first = embedder.submit([[1] * 8, [2] * 8])
    forward.started.acquire(timeout=60)
    second = embedder.submit([[3] * 8])
    third = embedder.submit([[4] * 8])
    assert embedder.snapshot().requests_processing == 1 and embedder.snapshot().requests_deferred == 2
    assert first.cancel() and second.cancel()
    forward.go.release(100)
    assert third.result(60)
    with pytest.raises(CancelledError):
        first.result(0)
    assert forward.batches == [[1] * 8, [4] * 8]
    assert embedder.snapshot().requests_deferred == 0


def test_failed_batch_fails_only_its_requests(slow: tuple[Slow, Embedder]) -> None:
    forward, embedder = slow
    forward.error = ValueError("broken")
    lost = embedder.submit([[1] * 8, [2] * 8])
    forward.started.acquire(timeout=60)
    forward.go.release()
    with pytest.raises(ComputeFailed, match="broken"):
        lost.result(60)
    forward.error = None
    forward.go.release(100)
    assert embedder.submit([[3]]).result(60)
    assert [2] * 8 not in forward.batches


def test_closing_ends_waiting_requests(slow: tuple[Slow, Embedder]) -> None:
    forward, embedder = slow
    embedder.submit([[1] * 8])
    forward.started.acquire(timeout=60)
    waiting = embedder.submit([[2] * 8])
    closing = threading.Thread(target=embedder.close)
    closing.start()
    with pytest.raises(EngineClosed):
        waiting.result(60)
    with pytest.raises(EngineClosed):
        embedder.submit([[1]])
    forward.go.release(100)
    closing.join(60)
    assert not closing.is_alive()


# --- pooling and norms ------------------------------------------------------------------------------------------------


def test_rows_needed_for_each_pooling() -> None:
    assert required_rows(Pooling.NONE, 5, True) == required_rows(Pooling.MEAN, 5, False) == (0, 5)
    assert required_rows(Pooling.CLS, 5, True) == required_rows(Pooling.RANK, 5, False) == (0, 1)
    assert required_rows(Pooling.LAST, 5, False) == required_rows(Pooling.RANK, 5, True) == (4, 5)


def test_a_pool_is_a_copy() -> None:
    rows = np.ones((1, 4), np.float32)
    for pooling in Pooling:
        pooled = pool(rows, pooling)
        assert not np.shares_memory(pooled, rows) and pooled.dtype == np.float32


@pytest.mark.parametrize(
    ("kind", "norm"),
    [(0, 4 / 32760), (1, 7.0), (2, 5.0), (3, 91 ** (1 / 3))],
)
def test_normalization(kind: int, norm: float) -> None:
    x = np.array([[3, -4, 0], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(normalize(x, kind), [[3 / norm, -4 / norm, 0], [0, 0, 0]], rtol=1e-6)
    assert normalize(x, -1).tobytes() == x.tobytes()
