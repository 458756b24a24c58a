"""Embeddings and reranking: llama-server's endpoints, OpenAI's, and reranking in the forms of Jina and TEI."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from llamado.engine.embedding.embedder import Embedding
from llamado.engine.embedding.pooling import normalize
from llamado.errors import LlamadoError
from llamado.http.answer import error_response, json_response
from llamado.http.json_body import read_object
from llamado.http.monitoring.request_log import current
from llamado.http.streams import disconnected
from llamado.models.hparams import Pooling
from llamado.server.api.routes import Routes
from llamado.server.errors import ApiError, invalid, not_supported, translate
from llamado.server.generate.json_values import flag, integer, text, type_name
from llamado.server.generate.prompts import tokenize_prompts
from llamado.server.generate.threads import in_thread, off_loop, size_of
from llamado.server.model import ServedEmbeddings, ServedTokenizer
from llamado.server.state import ServerState

_FEW = 1 << 16
"""Most numbers that are written as JSON in the event loop; more are written in a thread."""

BodyBuilder = Callable[[list[Embedding]], Any]
PendingEmbeddings = tuple[Future[list[Embedding]], int]
"""The embeddings to come, and the number of tokens of their texts."""


class EmbeddingsResponse(Response):
    """A response that waits for embeddings, and cancels them if the client disconnects."""

    def __init__(self, pending: PendingEmbeddings, build: BodyBuilder) -> None:
        super().__init__(media_type="application/json")
        self._future, self._n_tokens = pending
        self._build = build

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = current.get()
        if record is not None:
            record.n_prompt += self._n_tokens
            record.prompt_tokens += self._n_tokens
        waiting = asyncio.wrap_future(self._future)
        response: Response
        try:
            with disconnected(receive, waiting.cancel):
                found = await waiting
            size = sum(embedding.vectors.size for embedding in found)
            response = json_response(
                self._write(found) if size <= _FEW else await in_thread(lambda: self._write(found))
            )
        except asyncio.CancelledError:
            if waiting.cancelled():  # the client is gone
                return
            raise
        except LlamadoError as error:
            response = error_response(translate(error), scope["path"])
        finally:
            waiting.cancel()
        await response(scope, receive, send)

    def _write(self, found: list[Embedding]) -> bytes:
        return orjson.dumps(self._build(found), option=orjson.OPT_SERIALIZE_NUMPY)


def submit(embeddings: ServedEmbeddings, texts: list[list[int]]) -> PendingEmbeddings:
    """Submit texts, as tokens, for embedding."""
    return embeddings.embedder.submit(texts), sum(map(len, texts))


async def _embed(state: ServerState, request: Request, *, openai: bool) -> Response:
    served = state.loaded()
    embeddings = served.embeddings
    if embeddings is None:
        raise not_supported("This server does not support embeddings. Start it with `--embeddings`")
    if openai and embeddings.pooling is Pooling.NONE:
        raise invalid("Pooling type 'none' is not OAI compatible. Please use a different pooling type")
    body = await read_object(request)
    if "input" in body:
        given = body["input"]
    elif "content" in body:
        given, openai = body["content"], False
    else:
        raise invalid('"input" or "content" must be provided')
    as_base64 = _as_base64(body)
    n_dimensions = _dimensions(body, served.info.n_embd) if openai else None
    kind = _norm(body, embeddings)

    texts = await off_loop(lambda: submit(embeddings, _texts(given, served.tokenizer)), size_of(given))
    name = text(body, "model", served.info.name)
    if openai:
        return EmbeddingsResponse(texts, lambda found: _openai_body(found, name, kind, as_base64, n_dimensions))
    return EmbeddingsResponse(texts, lambda found: _native_body(found, kind, embeddings.pooling))


async def _rerank(state: ServerState, request: Request) -> Response:
    served = state.loaded()
    embeddings = served.embeddings
    if embeddings is None or not embeddings.reranks:
        raise not_supported("This server does not support reranking. Start it with `--reranking`")
    body = await read_object(request)
    if "query" not in body:
        raise invalid('"query" must be provided')
    query = body["query"]
    if not isinstance(query, str):
        raise invalid('"query" must be a string')
    documents = _documents(body)
    top_n = integer(body, "top_n", len(documents))
    if top_n < 0:
        raise invalid(f'"top_n" must be 0 or more, but is {top_n}')

    def work() -> PendingEmbeddings:
        return submit(embeddings, [embeddings.pair(query, document) for document in documents])

    texts = await off_loop(work, len(documents) * len(query) + size_of(documents))
    name = text(body, "model", served.info.name)
    if "texts" not in body:
        return EmbeddingsResponse(texts, lambda found: _jina_body(found, name, top_n))
    shown = documents if flag(body, "return_text") else None
    return EmbeddingsResponse(texts, lambda found: _ranked(found, "score", top_n, shown))


def embeddings_router(state: ServerState) -> Routes:
    """Return the routes of embeddings and reranking."""
    router = Routes("embeddings")

    @router.post("/embedding", operation=_schema("content", "input", "embd_normalize"))
    @router.post("/embeddings", operation=_schema("content", "input", "embd_normalize"))
    async def native_embeddings(request: Request) -> Response:
        return await _embed(state, request, openai=False)

    @router.post(
        "/v1/embeddings", operation=_schema("input", "model", "encoding_format", "embd_normalize", "dimensions")
    )
    async def openai_embeddings(request: Request) -> Response:
        return await _embed(state, request, openai=True)

    @router.post("/rerank", operation=_schema("query", "documents", "texts", "top_n", "model", "return_text"))
    @router.post("/reranking", operation=_schema("query", "documents", "texts", "top_n", "model", "return_text"))
    @router.post("/v1/rerank", operation=_schema("query", "documents", "texts", "top_n", "model", "return_text"))
    @router.post("/v1/reranking", operation=_schema("query", "documents", "texts", "top_n", "model", "return_text"))
    async def rank(request: Request) -> Response:
        return await _rerank(state, request)

    return router


_TYPES: Mapping[str, dict[str, Any]] = {
    "embd_normalize": {"type": "number", "description": "-1 none, 0 largest absolute, 1 taxicab, 2 Euclidean, p"},
    "dimensions": {"type": "integer", "minimum": 1},
    "encoding_format": {"type": "string", "enum": ["float", "base64"]},
    "query": {"type": "string"},
    "documents": {"type": "array", "items": {"type": "string"}},
    "texts": {"type": "array", "items": {"type": "string"}},
    "top_n": {"type": "integer", "minimum": 0},
    "return_text": {"type": "boolean"},
}


def _schema(*names: str) -> dict[str, Any]:
    """Return the OpenAPI description of a body with these fields."""
    schema = {"type": "object", "properties": {name: _TYPES.get(name, {}) for name in names}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


# --- bodies -----------------------------------------------------------------------------------------------------------


def _as_base64(body: Mapping[str, Any]) -> bool:
    if "encoding_format" not in body:
        return False
    given = body["encoding_format"]
    if not isinstance(given, str):
        raise invalid(f"type must be string, but is {type_name(given)}")
    if given not in ("float", "base64"):
        raise invalid("The format to return the embeddings in. Can be either float or base64")
    return given == "base64"


def _dimensions(body: Mapping[str, Any], n_embd: int) -> int | None:
    """Return the length to cut vectors to, for models trained with Matryoshka lengths; None: all. Raises ApiError."""
    if "dimensions" not in body:
        return None
    given = body["dimensions"]
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= n_embd:
        raise invalid(f'"dimensions" must be a whole number from 1 to {n_embd}')
    return given


def _norm(body: Mapping[str, Any], embeddings: ServedEmbeddings) -> int:
    if "embd_normalize" not in body:
        return embeddings.normalize
    given = body["embd_normalize"]
    if not isinstance(given, (int, float)):
        raise invalid(f"type must be number, but is {type_name(given)}")
    return int(given)


def _texts(given: Any, tokenizer: ServedTokenizer) -> list[list[int]]:
    """Return the tokens of a body's text or texts, each in any shape of a prompt. Raises ApiError."""
    if isinstance(given, list) and not any(isinstance(item, int) and not isinstance(item, bool) for item in given):
        if not given:
            raise invalid('"input" must not be empty')
        return [_tokens(item, tokenizer) for item in given]
    return [_tokens(given, tokenizer)]


def _tokens(given: Any, tokenizer: ServedTokenizer) -> list[int]:
    if isinstance(given, dict) and "content" in given:
        return tokenizer.encode(_content(given["content"]), add_special=True, parse_special=True)
    # `tokenize_prompts` would read a bare number as a list of one token.
    entry = given if isinstance(given, (str, list, dict)) else None
    return tokenize_prompts([entry], tokenizer, most=1)[0].tokens


def _content(parts: Any) -> str:
    """Return the text of an array of content parts, as in a chat message. Raises ApiError."""
    if not isinstance(parts, list):
        raise invalid('"content" must be an array')
    found = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image_url", "input_audio", "input_video"):
            what = str(kind).removeprefix("input_").removesuffix("_url")
            raise ApiError("server_error", f"{what} input is not supported")
        if kind != "text":
            raise invalid("unsupported content[].type")
        found.append(text(part, "text"))
    return "".join(found)


def _documents(body: Mapping[str, Any]) -> list[str]:
    """Return the documents to rank, from `documents` or `texts`; as in llama-server, a wrong type counts as absent."""
    for name in ("documents", "texts"):
        given = body.get(name)
        if isinstance(given, list) and all(isinstance(item, str) for item in given):
            if given:
                return given
            break
    raise invalid('"documents" must be a non-empty string array')


# --- answers ----------------------------------------------------------------------------------------------------------


def _native_body(found: Sequence[Embedding], kind: int, pooling: Pooling) -> list[dict[str, Any]]:
    # Vectors of single tokens are not normalized.
    kind = -1 if pooling is Pooling.NONE else kind
    return [{"index": i, "embedding": normalize(embedding.vectors, kind)} for i, embedding in enumerate(found)]


def _openai_body(
    found: Sequence[Embedding], model: str, kind: int, as_base64: bool, n_dimensions: int | None
) -> dict[str, Any]:
    data: list[dict[str, Any]] = []
    for i, embedding in enumerate(found):
        vector = normalize(embedding.vectors[:1, :n_dimensions], kind)[0]
        item: dict[str, Any] = {"embedding": vector, "index": i, "object": "embedding"}
        if as_base64:
            encoded = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            item = {**item, "embedding": encoded, "encoding_format": "base64"}
        data.append(item)
    return {"model": model, "object": "list", "usage": _usage(found), "data": data}


def _jina_body(found: Sequence[Embedding], model: str, top_n: int) -> dict[str, Any]:
    results = _ranked(found, "relevance_score", top_n, None)
    return {"model": model, "object": "list", "usage": _usage(found), "results": results}


def _ranked(found: Sequence[Embedding], label: str, top_n: int, shown: list[str] | None) -> list[dict[str, Any]]:
    """Return the best `top_n` results, best first; `shown`: the texts to return with the scores."""
    results: list[dict[str, Any]] = []
    for i, embedding in enumerate(found):
        result: dict[str, Any] = {"index": i, label: float(embedding.vectors[0, 0])}
        results.append(result if shown is None else {**result, "text": shown[i]})
    return sorted(results, key=lambda result: -result[label])[:top_n]


def _usage(found: Sequence[Embedding]) -> dict[str, int]:
    n_tokens = sum(embedding.n_tokens for embedding in found)
    return {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
