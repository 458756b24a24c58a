"""Generation endpoints: llama-server's `/completion`, and OpenAI's completions and chat completions."""

from __future__ import annotations

import orjson
from starlette.requests import Request
from starlette.responses import Response

from llamado.http.answer import json_response
from llamado.http.json_body import read_object
from llamado.server.api.openapi import describe
from llamado.server.api.routes import Routes
from llamado.server.errors import invalid
from llamado.server.generate.formats import ChatFormat, CompletionsFormat, NativeFormat
from llamado.server.generate.generator import Generator
from llamado.server.generate.json_values import text


def completions_router(generator: Generator) -> Routes:
    """Return the routes of completions and chat completions."""
    router = Routes("generate")

    @router.post("/completion", **describe("completion"))
    @router.post("/completions", **describe("completion"))
    async def completion(request: Request) -> Response:
        return await generator.complete(await read_object(request), NativeFormat, native=True)

    @router.post("/v1/completions", **describe("openai_completion"))
    async def openai_completions(request: Request) -> Response:
        return await generator.complete(await read_object(request), CompletionsFormat)

    @router.post("/v1/chat/completions", **describe("chat"))
    @router.post("/chat/completions", **describe("chat"))
    async def chat_completions(request: Request) -> Response:
        return await generator.chat(await read_object(request), ChatFormat)

    @router.post("/v1/chat/completions/control", **describe("control"))
    async def control(request: Request) -> Response:
        body = await read_object(request)
        id, action = text(body, "id"), text(body, "action")
        if not id:
            raise invalid("missing completion id")
        if action != "reasoning_end":
            raise invalid("unknown control action")
        refusal = generator.end_reasoning(id)
        return json_response(orjson.dumps({"success": False, "message": refusal} if refusal else {"success": True}))

    @router.post("/v1/chat/completions/input_tokens", **describe("chat_count"))
    @router.post("/chat/completions/input_tokens", **describe("chat_count"))
    async def input_tokens(request: Request) -> Response:
        n_tokens = await generator.count(await read_object(request))
        return json_response(orjson.dumps({"input_tokens": n_tokens, "object": "response.input_tokens"}))

    @router.post("/apply-template", **describe("apply_template"))
    async def apply_template(request: Request) -> Response:
        return json_response(orjson.dumps({"prompt": await generator.render(await read_object(request))}))

    return router
