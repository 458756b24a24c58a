"""Embeddings and reranking over HTTP with tiny models, and compared with llama.cpp's llama-server if installed."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from fakes import client_of, read
from minilm import make_bert, minilm
from ports import free_port
from tiny_models import make_llama
from waiting import GUARD

from llamado.engine.embedding.embedder import Embedding
from llamado.engine.embedding.load import pair
from llamado.engine.errors import QueueFull
from llamado.engine.options import EngineOptions, ModelSource
from llamado.gguf.metadata import Metadata, StringArray
from llamado.gguf.sources.resolve import cache_dir
from llamado.models import Pooling
from llamado.server.api.embeddings import EmbeddingsResponse
from llamado.server.load import load_served
from llamado.server.model import ServedModel
from llamado.server.settings import Settings
from llamado.server.state import ServerState
from llamado.server.switches import Switches
from llamado.text.tokenizer.tokenizer import load_tokenizer

Array = np.ndarray[Any, Any]


def load(path: Path, **options: Any) -> ServedModel:
    settings = Settings(
        source=ModelSource(spec=str(path)), engine=EngineOptions(**{"n_threads": 1, "n_slots": 4} | options)
    )
    return load_served(settings, lambda share, what: None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Iterator[ServedModel]:
    served = load(make_bert(folder / "encoder.gguf"), embeddings=True)
    yield served
    served.close(1)


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Iterator[ServedModel]:
    path = make_bert(folder / "reranker.gguf", classifier=True, n_scores=1, pooling=gguf.PoolingType.RANK)
    served = load(path, reranking=True)
    yield served
    served.close(1)


def client(served: ServedModel) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return client_of(ServerState(switches=Switches(metrics=True), served=served))


def ask(served: ServedModel, path: str, body: Any) -> tuple[int, Any]:
    async def work() -> tuple[int, Any]:
        async with client(served) as http:
            return read(await http.post(path, json=body))

    return asyncio.run(work())


def look(served: ServedModel, path: str) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client(served) as http:
            return await http.get(path)

    return asyncio.run(work())


# --- embeddings -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/embedding", "/embeddings"])
def test_native_form(encoder: ServedModel, path: str) -> None:
    status, one = ask(encoder, path, {"content": "hello world"})
    assert status == 200 and [set(item) for item in one] == [{"index", "embedding"}]
    assert np.shape(one[0]["embedding"]) == (1, 64)
    assert np.linalg.norm(one[0]["embedding"]) == pytest.approx(1, abs=1e-5)
    status, many = ask(encoder, path, {"input": ["hello world", "text"]})
    assert status == 200 and [item["index"] for item in many] == [0, 1]
    assert many[0] == one[0]


def test_openai_form(encoder: ServedModel) -> None:
    status, body = ask(encoder, "/v1/embeddings", {"input": ["hello world", "a text"], "model": "m"})
    assert status == 200 and list(body) == ["model", "object", "usage", "data"]
    assert (body["model"], body["object"]) == ("m", "list")
    assert body["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
    assert [list(item) for item in body["data"]] == [["embedding", "index", "object"]] * 2
    vector = np.array(body["data"][1]["embedding"], np.float32)
    status, encoded = ask(encoder, "/v1/embeddings", {"input": "a text", "encoding_format": "base64"})
    assert status == 200 and encoded["data"][0]["encoding_format"] == "base64"
    same = np.frombuffer(base64.b64decode(encoded["data"][0]["embedding"]), "<f4")
    assert same.tobytes() == vector.tobytes()
    assert encoded["model"] == encoder.info.name


def test_content_makes_the_form_native(encoder: ServedModel) -> None:
    assert isinstance(ask(encoder, "/v1/embeddings", {"content": "a"})[1], list)
    assert isinstance(ask(encoder, "/v1/embeddings", {"content": "a", "input": "b"})[1], dict)


def test_shapes_of_texts(encoder: ServedModel) -> None:
    tokens = encoder.tokenizer.encode("hello world", add_special=True)
    wanted = ask(encoder, "/embedding", {"content": "hello world"})[1][0]
    for given in (
        tokens,
        [tokens],
        {"prompt_string": "hello world"},
        [{"prompt_string": "hello world"}],
        {"content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]},
    ):
        assert ask(encoder, "/embedding", {"content": given})[1] == [wanted], given


def test_norms(encoder: ServedModel) -> None:
    def vector(kind: Any) -> Array:
        status, body = ask(encoder, "/v1/embeddings", {"input": "hello", "embd_normalize": kind})
        assert status == 200
        return np.array(body["data"][0]["embedding"])

    plain = vector(-1)
    np.testing.assert_allclose(vector(2), plain / np.linalg.norm(plain), rtol=1e-5)
    np.testing.assert_allclose(vector(1.9), plain / np.abs(plain).sum(), rtol=1e-5)
    np.testing.assert_allclose(vector(0), plain / np.abs(plain).max() * 32760, rtol=1e-5)


def test_dimensions_cuts_vectors_and_normalizes_them_again(encoder: ServedModel) -> None:
    def vector(**more: Any) -> Any:
        status, answer = ask(encoder, "/v1/embeddings", {"input": "a", **more})
        return np.array(answer["data"][0]["embedding"]) if status == 200 else answer["error"]["message"]

    whole, cut = vector(), vector(dimensions=8)
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-5)
    np.testing.assert_allclose(vector(dimensions=whole.size), whole)
    for wrong in (0, whole.size + 1, 1.5, "8", True):
        assert f"from 1 to {whole.size}" in vector(dimensions=wrong)


def test_null_is_absent(encoder: ServedModel) -> None:
    plain = ask(encoder, "/v1/embeddings", {"input": "a"})
    nulls = dict.fromkeys(("encoding_format", "embd_normalize", "model", "content", "dimensions"))
    assert ask(encoder, "/v1/embeddings", {"input": "a", **nulls}) == plain
    assert plain[0] == 200


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, '"input" or "content" must be provided'),
        ({"input": []}, '"input" must not be empty'),
        ({"input": [[]]}, "Input content cannot be empty"),
        ({"input": 5}, "elements must be a string"),
        ({"input": None}, '"input" or "content" must be provided'),
        ({"input": ["a", True]}, "elements must be a string"),
        ({"input": [1.5]}, "elements must be a string"),
        ({"input": [10_000_000]}, "invalid tokens"),
        ({"input": {"content": "a"}}, '"content" must be an array'),
        ({"input": {"content": [{"type": "x"}]}}, "unsupported content"),
        ({"input": "a", "encoding_format": "xml"}, "Can be either float or base64"),
        ({"input": "a", "embd_normalize": "x"}, "type must be number, but is string"),
    ],
)
def test_wrong_requests(encoder: ServedModel, body: Any, message: str) -> None:
    status, answer = ask(encoder, "/v1/embeddings", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert message in answer["error"]["message"]


@pytest.mark.slow
def test_a_text_that_is_too_long(folder: Path) -> None:
    served = load(make_bert(folder / "long.gguf", n_ctx=64), embeddings=True, n_ubatch=48)
    try:
        status, body = ask(served, "/v1/embeddings", {"input": ["a", "a " * 60]})
        assert (status, body["error"]["type"]) == (400, "exceed_context_size_error")
        message = "input (62 tokens) is too large to process. increase the physical batch size (current batch size: 48)"
        assert body["error"]["message"].startswith(message) and "-b 62 -ub 62" in body["error"]["message"]
    finally:
        served.close(1)


def test_the_pooling_of_the_file_can_be_overridden(folder: Path) -> None:
    served = load(make_bert(folder / "other.gguf"), embeddings=True, metadata=(("bert.pooling_type", 2),))
    try:
        assert served.embeddings is not None and served.embeddings.pooling is Pooling.CLS
    finally:
        served.close(1)


def test_vectors_of_tokens(folder: Path) -> None:
    served = load(make_bert(folder / "tokens.gguf"), embeddings=True, pooling="none")
    try:
        status, body = ask(served, "/embedding", {"content": "hello world"})
        assert status == 200 and np.shape(body[0]["embedding"]) == (4, 64)
        assert np.linalg.norm(body[0]["embedding"][0]) > 1.5, "they are not normalized"
        status, body = ask(served, "/v1/embeddings", {"input": "a"})
        assert status == 400 and "Pooling type 'none' is not OAI compatible" in body["error"]["message"]
    finally:
        served.close(1)


# --- reranking --------------------------------------------------------------------------------------------------------

DOCUMENTS = ["good text", "bad model", "hello world that is it", "a"]


@pytest.mark.parametrize("path", ["/rerank", "/reranking", "/v1/rerank", "/v1/reranking"])
def test_jinas_form(reranker: ServedModel, path: str) -> None:
    status, body = ask(reranker, path, {"query": "what", "documents": DOCUMENTS, "model": "m"})
    assert status == 200 and list(body) == ["model", "object", "usage", "results"]
    # [CLS] what [SEP] document
    n_tokens = sum(3 + len(reranker.tokenizer.encode(document)) for document in DOCUMENTS)
    assert body["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    scores = [item["relevance_score"] for item in body["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(item["index"] for item in body["results"]) == [0, 1, 2, 3]
    (alone,) = ask(reranker, path, {"query": "what", "documents": [DOCUMENTS[2]]})[1]["results"]
    assert alone["relevance_score"] == next(i["relevance_score"] for i in body["results"] if i["index"] == 2)


def test_teis_form(reranker: ServedModel) -> None:
    status, body = ask(reranker, "/rerank", {"query": "what", "texts": DOCUMENTS, "return_text": True, "top_n": 3})
    assert status == 200 and [list(item) for item in body] == [["index", "score", "text"]] * 3
    assert all(item["text"] == DOCUMENTS[item["index"]] for item in body)
    assert [list(item) for item in ask(reranker, "/rerank", {"query": "a", "texts": ["b"]})[1]] == [["index", "score"]]


@pytest.mark.parametrize(
    ("kind", "says", "between"),
    [
        ({"model": "gpt2", "pre": "gpt-2"}, {}, [*"qd"]),
        ({"model": "gpt2", "pre": "jina-v1-en"}, {}, ["q", "|", "d"]),
        ({"model": "gpt2", "pre": "jina-v1-en"}, {"add_sep_token": False, "add_eos_token": True}, [*"q.d."]),
        ({"model": "gpt2", "pre": "gpt-2"}, {"add_sep_token": True, "add_bos_token": True}, [*"^q|d"]),
        ({"model": "bert"}, {}, [*"^q|d"]),
        ({"model": "bert"}, {"add_sep_token": False, "add_eos_token": True}, [*"^q.d."]),
        ({"model": "bert"}, {"add_bos_token": False, "add_eos_token": True}, [*"q.|d."]),
    ],
)
def test_tokens_between_query_and_document(kind: dict[str, Any], says: dict[str, bool], between: list[str]) -> None:
    """They depend on the type of the vocabulary or the file, not on the special tokens around a single text."""
    marks = dict(zip(("bos_token_id", "eos_token_id", "seperator_token_id"), range(3), strict=True))
    letters = ["q", "d"] if kind["model"] == "gpt2" else ["▁q", "▁d"]
    values: dict[str, Any] = {
        "tokens": StringArray.of(["^", ".", "|", *letters]),
        "token_type": np.array([3, 3, 3, 1, 1], np.int32),
        "merges": StringArray.of(["x y"]),
        **marks,
    }
    tokenizer = load_tokenizer(Metadata({f"tokenizer.ggml.{key}": v for key, v in (values | kind | says).items()}))
    assert [tokenizer.text(token).removeprefix("▁") for token in pair("q", "d", tokenizer, "")] == between
    around = [tokenizer.text(token).removeprefix("▁") for token in tokenizer.encode("q", add_special=True)]
    gpt2 = [*(["^"] * says.get("add_bos_token", False)), "q", *(["."] * says.get("add_eos_token", False))]
    assert around == ([*"^q|"] if kind["model"] == "bert" else gpt2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"documents": ["a"]}, '"query" must be provided'),
        ({"query": 5, "documents": ["a"]}, '"query" must be a string'),
        ({"query": "a"}, '"documents" must be a non-empty string array'),
        ({"query": "a", "documents": []}, '"documents" must be a non-empty string array'),
        ({"query": "a", "documents": "b"}, '"documents" must be a non-empty string array'),
        ({"query": "a", "documents": ["b", 5]}, '"documents" must be a non-empty string array'),
        ({"query": "a", "documents": ["b"], "top_n": -1}, '"top_n" must be 0 or more'),
    ],
)
def test_wrong_rerank_requests(reranker: ServedModel, body: Any, message: str) -> None:
    status, answer = ask(reranker, "/rerank", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert message in answer["error"]["message"]


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_servers_without_embeddings_return_501(encoder: ServedModel, folder: Path) -> None:
    status, body = ask(encoder, "/rerank", {"query": "a", "documents": ["b"]})
    assert (status, body["error"]["type"]) == (501, "not_supported_error") and "--reranking" in body["error"]["message"]
    served = load(make_llama(folder / "plain.gguf"))
    try:
        for path in ("/embedding", "/embeddings", "/v1/embeddings"):
            status, body = ask(served, path, {"input": "a"})
            assert status == 501 and "--embeddings" in body["error"]["message"]
    finally:
        served.close(1)


@pytest.mark.slow
def test_an_encoder_does_not_generate(encoder: ServedModel) -> None:
    for stream in (False, True):
        status, body = ask(encoder, "/completion", {"prompt": "hello", "stream": stream})
        assert (status, body["error"]["type"]) == (500, "server_error")
        assert body["error"]["message"] == "the current context does not support logits computation. skipping"


def test_monitoring_of_an_encoder(encoder: ServedModel) -> None:
    ask(encoder, "/embedding", {"content": "hello world"})
    assert look(encoder, "/health").json() == {"status": "ok"}
    assert look(encoder, "/props").json()["default_generation_settings"]["n_ctx"] == 128
    assert [slot["is_processing"] for slot in look(encoder, "/slots").json()] == [False] * 4
    assert look(encoder, "/v1/models").json()["data"][0]["meta"]["n_embd"] == 64
    lines = dict(line.split(" ") for line in look(encoder, "/metrics").text.splitlines() if line[0] != "#")
    assert float(lines["llamacpp:prompt_tokens_total"]) >= 4 and float(lines["llamacpp:n_tokens_max"]) >= 4


@pytest.mark.slow
def test_a_decoder_embeds_and_generates(folder: Path) -> None:
    served = load(make_llama(folder / "both.gguf"), embeddings=True, pooling="last", n_ctx=256)
    try:
        status, body = ask(served, "/v1/embeddings", {"input": "hello"})
        assert status == 200 and len(body["data"][0]["embedding"]) == 128
        status, body = ask(served, "/completion", {"prompt": "hello", "n_predict": 2, "ignore_eos": True})
        assert (status, body["tokens_predicted"]) == (200, 2)
    finally:
        served.close(1)


def test_a_full_queue(encoder: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(texts: Any) -> Any:
        raise QueueFull(7, 1)

    assert encoder.embeddings is not None
    monkeypatch.setattr(encoder.embeddings.embedder, "submit", refuse)
    status, body = ask(encoder, "/embedding", {"content": "a"})
    assert status == 503 and "7 requests are waiting" in body["error"]["message"]


def test_a_client_disconnect_cancels_its_texts() -> None:
    future: Future[list[Embedding]] = Future()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(EmbeddingsResponse((future, 1), lambda found: found)({"type": "http"}, receive, send))
    assert future.cancelled() and not sent


# --- compared with llama-server ---------------------------------------------------------------------------------------

TEXTS = [
    "A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby.", "",
    "A cheetah is running behind its prey.", "Someone in a gorilla costume is playing a set of drums.", "x",
    "L'été à Paris, naïve façade, ÜBER alles", "你好，世界！ 今日は", "emoji 😀 and ™ signs", "3.14159 2,000 €5",
    "supercalifragilisticexpialidocious" * 2, "The quick brown fox jumps over the lazy dog. " * 6, "word " * 300,
    *(f"{verb} the {what}" for verb in ("see", "hear", "draw", "like", "paint", "miss")
      for what in ("sun", "moon", "rain", "snow", "sea", "two cats asleep on a warm red chair")),
]  # fmt: skip


@contextmanager
def both(peer: Path, model: Path, *options: str) -> Iterator[tuple[str, str]]:
    """Start our server and llama-server with the same model and options; return their addresses."""

    ports = [free_port(), free_port()]
    common = ["-m", str(model), "-t", "1", "-a", "m", *options, "--port"]
    ours = [sys.executable, "-m", "llamado", "serve", *common, str(ports[0])]
    theirs = [str(peer / "llama-server"), "-ngl", "0", *common, str(ports[1])]
    quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(command, **quiet) for command in (ours, theirs)]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for process, url in zip(processes, urls, strict=True):
            for _ in range(1200):
                assert process.poll() is None, "the server ended"
                try:
                    if httpx.get(f"{url}/health").status_code == 200:
                        break
                except httpx.HTTPError:
                    pass
                time.sleep(0.05)
        yield urls[0], urls[1]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(GUARD)
            except subprocess.TimeoutExpired:
                process.kill()


def compare(urls: tuple[str, str], path: str, body: Any) -> tuple[Any, Any]:
    """Return both answers; assert that status and keys are equal."""
    ours, theirs = (httpx.post(f"{url}{path}", content=json.dumps(body), timeout=120) for url in urls)
    assert ours.status_code == theirs.status_code, (body, ours.text[:300], theirs.text[:300])
    first, second = ours.json(), theirs.json()
    assert keys(first) == keys(second), body
    return first, second


def check_too_long(urls: tuple[str, str], path: str, body: Any) -> None:
    """A text that is too long is a 400 here and a 500 in llama-server."""
    ours, theirs = (httpx.post(f"{url}{path}", json=body, timeout=120) for url in urls)
    assert (ours.status_code, theirs.status_code) == (400, 500)
    assert all("is too large to process" in answer.json()["error"]["message"] for answer in (ours, theirs))


def keys(value: Any) -> Any:
    """Return the shape of a JSON value, with sorted keys and without the values of numbers."""
    if isinstance(value, dict):
        return {key: keys(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [len(value), *({json.dumps(keys(inner), sort_keys=True) for inner in value})]
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def numbers(body: Any) -> list[Array]:
    """Return the vectors of a native or OpenAI body as rows."""
    items = body["data"] if isinstance(body, dict) else body
    return [np.atleast_2d(np.array(item["embedding"])) for item in items]


def check_alike(ours: list[Array], theirs: list[Array], most: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        assert cosine.min() >= 0.9999
        assert np.abs(a - b).max() <= most * np.abs(b).max()


@pytest.mark.interop
@pytest.mark.parametrize(
    ("wtype", "pooling"), [("F32", "mean"), ("F16", "mean"), ("F16", "cls"), ("F16", "last"), ("F16", "none")]
)
def test_minilm_compared_with_llama_server(peer_bin: Path, wtype: str, pooling: str) -> None:
    model = minilm(wtype, cache_dir() / "models")
    with both(peer_bin, model, "--embeddings", "--pooling", pooling) as urls:
        assert len(TEXTS) == 50
        check_alike(*(numbers(body) for body in compare(urls, "/embedding", {"content": TEXTS})), most=0.01)
        if pooling == "mean":
            for body in ({"input": TEXTS[:3]}, {"input": "a", "encoding_format": "float"}, {"input": [7592, 2088]}):
                check_alike(*(numbers(answer) for answer in compare(urls, "/v1/embeddings", body)), most=0.01)
            for kind in (-1, 0, 1, 2, 3):
                body = {"input": "hello", "embd_normalize": kind}
                check_alike(*(numbers(answer) for answer in compare(urls, "/v1/embeddings", body)), most=0.01)
            for text in TEXTS:
                ours, theirs = compare(urls, "/tokenize", {"content": text, "add_special": True, "with_pieces": True})
                assert ours == theirs


@pytest.mark.interop
def test_errors_compared_with_llama_server(peer_bin: Path) -> None:
    with both(peer_bin, minilm("F16", cache_dir() / "models"), "--embeddings") as urls:
        for path, body in (
            ("/v1/embeddings", {}),
            ("/v1/embeddings", {"input": []}),
            ("/v1/embeddings", {"input": [[]]}),
            ("/v1/embeddings", {"input": 5}),
            ("/v1/embeddings", {"input": [99999999]}),
            ("/v1/embeddings", {"input": {"content": "a"}}),
            ("/v1/embeddings", {"input": {"content": ["a"]}}),
            ("/v1/embeddings", {"input": "a", "encoding_format": "xml"}),
            ("/rerank", {"query": "a", "documents": ["b"]}),
            ("/completion", {"prompt": "a", "n_predict": 2}),
            ("/completion", {"prompt": "a", "n_predict": 2, "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ):
            ours, theirs = compare(urls, path, body)
            assert ours == theirs, body
        check_too_long(urls, "/v1/embeddings", {"input": "word " * 600})
        check_too_long(urls, "/embedding", {"content": ["a", "word " * 600]})


@pytest.mark.interop
@pytest.mark.parametrize("pooling", ["last", "mean", "none"])
def test_smollm2_compared_with_llama_server(peer_bin: Path, smollm2_path: Path, pooling: str) -> None:
    with both(peer_bin, smollm2_path, "--embeddings", "--pooling", pooling, "-c", "2048") as urls:
        texts = ["A man is eating food.", "The girl is carrying a baby.", "你好 world", "x", "long text " * 20]
        ours, theirs = (numbers(body) for body in compare(urls, "/embedding", {"content": texts}))
        for a, b in zip(ours, theirs, strict=True):
            # 4-bit weights and 8-bit activations are rounded at other places
            cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
            assert cosine.min() >= 0.99
        status = httpx.post(f"{urls[0]}/completion", json={"prompt": "a", "n_predict": 2}, timeout=60).status_code
        assert status == 200


@pytest.mark.interop
@pytest.mark.parametrize("n_scores", [1, 3])
def test_a_reranker_compared_with_llama_server(peer_bin: Path, tmp_path: Path, n_scores: int) -> None:
    path = make_bert(
        tmp_path / "m.gguf", classifier=True, n_scores=n_scores, pooling=gguf.PoolingType.RANK, n_layer=1, seed=3
    )
    with both(peer_bin, path, "--reranking") as urls:
        bodies: list[Any] = [{"query": "what", "documents": [document]} for document in (*DOCUMENTS, "", "?!")]
        for body in bodies:
            ours, theirs = compare(urls, "/v1/rerank", body)
            assert ours["usage"] == theirs["usage"]
            score, other = (answer["results"][0]["relevance_score"] for answer in (ours, theirs))
            assert score == pytest.approx(other, abs=5e-3)
        for body in (
            {"query": "what", "texts": DOCUMENTS, "return_text": True},
            {"query": "what", "texts": DOCUMENTS, "top_n": 2},
            {"query": "what", "documents": DOCUMENTS, "texts": ["a"]},
            {"query": "what", "documents": DOCUMENTS, "return_text": True, "top_n": 0},
            {"query": "what [SEP] is", "documents": ["a [CLS] b"]},
            {"query": "what", "documents": []},
            {"query": ["what"], "documents": ["a"]},
            {"documents": ["a"]},
        ):
            ours, theirs = compare(urls, "/rerank", body)
            if "error" in ours:
                assert ours == theirs
        check_too_long(urls, "/rerank", {"query": "a", "documents": ["word " * 200]})
