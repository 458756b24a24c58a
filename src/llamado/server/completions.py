"""The endpoints that generate: llama-server's `/completion` and OpenAI's completions and chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from llamado.server.bodies import read_object
from llamado.server.chat import ChatPrompt, render_chat
from llamado.server.errors import ApiError, invalid, loading
from llamado.server.formats import NativeFormat, OpenAIFormat
from llamado.server.options import ENGINE_FIELDS, SERVER_FIELDS, make_requests, read_options
from llamado.server.prompts import off_loop, size_of, tokenize_prompts
from llamado.server.served import Served
from llamado.server.state import ServerState
from llamado.server.streaming import Answer, EventStream, Generation, Mailbox, json_response


def _body_schema(*extra: str) -> dict[str, Any]:
    """OpenAPI description of a body, from the table of options."""
    properties: dict[str, Any] = {name: {} for name in extra}
    for spec in ENGINE_FIELDS + SERVER_FIELDS:
        for name in spec.names:
            properties[name] = {"type": spec.type, "nullable": True, "description": spec.help}
    schema = {"type": "object", "properties": properties}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


Api = Literal["native", "completions", "chat"]


class Generator:
    """Turns a body into a response for one server."""

    def __init__(self, state: ServerState, mailbox: Mailbox) -> None:
        self._state = state
        self._mailbox = mailbox

    @property
    def served(self) -> Served:
        served = self._state.served
        if served is None:
            raise loading()
        return served

    async def respond(self, body: Mapping[str, Any], prompt: Any, api: Api, prefill: str = "") -> Response:
        """Answer a body whose prompt is already rendered. Raises LlamadoError."""
        served = self.served
        options = read_options(
            body,
            tokenizer=served.tokenizer,
            n_slots=served.n_slots,
            sse_ping_interval=self._state.switches.sse_ping_interval,
        )
        prompts = await off_loop(lambda: tokenize_prompts(prompt, served.tokenizer), size_of(prompt))
        n_ctx = served.info.n_ctx
        for tokens in prompts:
            if len(tokens) >= n_ctx:
                raise ApiError(
                    "exceed_context_size_error",
                    f"request ({len(tokens)} tokens) exceeds the available context size ({n_ctx} tokens), "
                    "try increasing it",
                    n_prompt_tokens=len(tokens),
                    n_ctx=n_ctx,
                )
        requests = make_requests(options, prompts, served.defaults)
        format: NativeFormat | OpenAIFormat
        if api == "native":
            texts = [await self._prompt_text(tokens) for tokens in prompts]
            format = NativeFormat(requests, options, served.info.name, texts)
        else:
            format = OpenAIFormat(requests, options, served.info.name, chat=api == "chat", prefill=prefill)
        generation = Generation(self._mailbox, served.engine, requests, parts=options.stream)
        generation.start()
        if options.stream:
            return EventStream(generation, format, ping_interval=options.sse_ping_interval)
        return Answer(generation, format.answer)

    async def _prompt_text(self, tokens: list[int]) -> str:
        tokenizer = self.served.tokenizer
        return await off_loop(lambda: tokenizer.decode(tokens, special=True), 4 * len(tokens))

    async def chat_prompt(self, body: Mapping[str, Any]) -> ChatPrompt:
        """Render a chat body's messages. Raises LlamadoError."""
        switches, template = self._state.switches, self.served.template

        def render() -> ChatPrompt:
            return render_chat(
                body, template, prefill_assistant=switches.prefill_assistant, kwargs=switches.chat_template_kwargs
            )

        return await off_loop(render, size_of(body.get("messages")))


def completions_router(generator: Generator) -> APIRouter:
    """`/completion` and its relatives."""
    router = APIRouter(tags=["generate"])

    @router.post("/completion", openapi_extra=_body_schema("prompt"))
    @router.post("/completions", openapi_extra=_body_schema("prompt"))
    async def completion(request: Request) -> Response:
        body = await read_object(request)
        if "prompt" not in body:
            raise invalid("key 'prompt' not found")
        return await generator.respond(body, body["prompt"], "native")

    @router.post("/v1/completions", openapi_extra=_body_schema("prompt"))
    async def openai_completions(request: Request) -> Response:
        body = await read_object(request)
        if "prompt" not in body:
            raise invalid("key 'prompt' not found")
        return await generator.respond(body, body["prompt"], "completions")

    @router.post("/v1/chat/completions", openapi_extra=_body_schema("messages"))
    @router.post("/chat/completions", openapi_extra=_body_schema("messages"))
    async def chat_completions(request: Request) -> Response:
        chat = await generator.chat_prompt(await read_object(request))
        return await generator.respond(chat.options, chat.prompt, "chat", chat.prefill)

    @router.post("/apply-template", openapi_extra=_body_schema("messages"))
    async def apply_template(request: Request) -> Response:
        chat = await generator.chat_prompt(await read_object(request))
        return json_response(orjson.dumps({"prompt": chat.prompt}))

    return router
