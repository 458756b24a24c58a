"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.answer import json_response
from llamado.http.json_body import read_object
from llamado.server.api.openapi import describe
from llamado.server.api.routes import Routes
from llamado.server.errors import invalid
from llamado.server.generate.generator import Generator
from llamado.server.generate.json_values import flag, type_name
from llamado.server.generate.prompts import tokenize_mixed
from llamado.server.generate.threads import off_loop, size_of
from llamado.server.model import ServedTokenizer


def _piece(tokenizer: ServedTokenizer, token: int) -> dict[str, Any]:
    """Return a token with its text, or with its bytes if they are not valid UTF-8."""
    raw = tokenizer.piece(token, special=True) if 0 <= token < tokenizer.n_vocab else b""
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}


def text_router(generator: Generator) -> Routes:
    """Return the routes of `/tokenize` and `/detokenize`."""
    router = Routes("text")

    @router.post("/tokenize", **describe("tokenize"))
    async def tokenize(request: Request) -> Response:
        body = await read_object(request)
        tokenizer = generator.served.tokenizer
        content = body.get("content")
        special, parse = flag(body, "add_special", False), flag(body, "parse_special", True)
        pieces = flag(body, "with_pieces", False)

        def work() -> bytes:
            tokens: list[Any] = []
            if "content" in body:
                tokens = list(tokenize_mixed(content, tokenizer, add_special=special, parse_special=parse))
            if any(abs(t) >= 2**31 for t in tokens):
                raise invalid("tokens must be 32-bit whole numbers")
            return orjson.dumps({"tokens": [_piece(tokenizer, t) for t in tokens] if pieces else tokens})

        return json_response(await off_loop(work, size_of(content), background=True))

    @router.post("/detokenize", **describe("detokenize"))
    async def detokenize(request: Request) -> Response:
        body = await read_object(request)
        tokenizer = generator.served.tokenizer
        given = body.get("tokens", [])
        if not isinstance(given, list):
            raise invalid(f"type must be array, but is {type_name(given)}")

        def work() -> bytes:
            for token in given:
                if not isinstance(token, (int, float)):
                    raise invalid(f"type must be number, but is {type_name(token)}")
                if not 0 <= token < tokenizer.n_vocab:
                    raise invalid(f"token {token} is outside the vocabulary of {tokenizer.n_vocab} tokens")
            tokens = [int(token) for token in given]
            return orjson.dumps({"content": tokenizer.decode(tokens, special=True)})

        return json_response(await off_loop(work, 4 * len(given), background=True))

    return router
