"""`/api/embed` and `/api/embeddings`: embeddings of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from llamado.engine.embedding.embedder import Embedding
from llamado.engine.embedding.pooling import normalize
from llamado.http.answer import json_response
from llamado.models.hparams import Pooling
from llamado.server.api.embeddings import EmbeddingsResponse, PendingEmbeddings, submit
from llamado.server.api.ollama.bodies import model_name
from llamado.server.api.ollama.formats import RequestTimes
from llamado.server.errors import invalid, not_supported
from llamado.server.generate.json_values import flag, integer, text
from llamado.server.generate.prompts import encode
from llamado.server.generate.threads import off_loop, size_of
from llamado.server.model import ServedEmbeddings, ServedModel, ServedTokenizer


async def embed_response(body: Mapping[str, Any], served: ServedModel, times: RequestTimes) -> Response:
    """Answer `/api/embed` with normalized embeddings of one text or several. Raises LlamadoError."""
    model = model_name(body)
    embeddings = _embeddings(served)
    given = body.get("input")
    texts = [given] if isinstance(given, str) and given else given if isinstance(given, list) else []
    if (given is not None and not isinstance(given, (str, list))) or not all(isinstance(one, str) for one in texts):
        raise invalid("invalid input type")
    if not texts:
        return json_response(orjson.dumps({"model": model, "embeddings": []}))
    n_dimensions = integer(body, "dimensions", 0)

    def make(found: list[Embedding]) -> dict[str, Any]:
        vectors = [embedding.vectors[0] for embedding in found]
        if n_dimensions > 0:
            vectors = [vector[:n_dimensions] for vector in vectors]
        return {
            "model": model,
            "embeddings": [normalize(vector[None], 2)[0] for vector in vectors],
            "total_duration": times.total(),
            "load_duration": times.load(),
            "prompt_eval_count": sum(embedding.n_tokens for embedding in found),
        }

    pending = await _submit(texts, embeddings, served, truncate=flag(body, "truncate", True))
    return EmbeddingsResponse(pending, make)


async def embedding_response(body: Mapping[str, Any], served: ServedModel) -> Response:
    """Answer `/api/embeddings` with the embedding of one text, not normalized. Raises LlamadoError."""
    model_name(body)
    embeddings = _embeddings(served)
    prompt = text(body, "prompt")
    if not prompt:
        return json_response(b'{"embedding":[]}')
    pending = await _submit([prompt], embeddings, served, truncate=True)
    return EmbeddingsResponse(pending, lambda found: {"embedding": found[0].vectors[0]})


def _embeddings(served: ServedModel) -> ServedEmbeddings:
    embeddings = served.embeddings
    if embeddings is None:
        raise not_supported("This server does not support embeddings. Start it with `--embeddings`")
    if embeddings.pooling in (Pooling.NONE, Pooling.RANK):
        raise invalid("this server's model has no embedding of a whole text: see --pooling")
    return embeddings


async def _submit(
    texts: Sequence[str], embeddings: ServedEmbeddings, served: ServedModel, *, truncate: bool
) -> PendingEmbeddings:
    def work() -> PendingEmbeddings:
        tokens = [_tokens(one, served.tokenizer, embeddings.max_tokens, truncate) for one in texts]
        return submit(embeddings, tokens)

    return await off_loop(work, size_of(list(texts)))


def _tokens(given: str, tokenizer: ServedTokenizer, most: int, truncate: bool) -> list[int]:
    """Return the tokens of a text. `truncate`: cut it to `most` tokens, and keep its end token. Raises ApiError."""
    tokens = encode(given, tokenizer, add_special=True, parse_special=True)
    if len(tokens) <= most:
        return tokens
    if not truncate:
        raise invalid(f"the input length ({len(tokens)} tokens) exceeds the context length ({most} tokens)")
    marks = tokenizer.encode("", add_special=True)
    ends = tokens[-1:] if len(marks) > 1 and marks[-1] == tokens[-1] else []
    return [*tokens[: most - len(ends)], *ends]
