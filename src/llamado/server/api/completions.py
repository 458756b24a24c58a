"""The endpoints that generate: llama-server's `/completion` and OpenAI's completions and chat completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from llamado.http.json_body import read_object
from llamado.server.api.openapi import describe
from llamado.server.errors import ApiError, invalid, loading, not_supported
from llamado.server.generate.chat_request import Conversation, prepare_chat, read_chat
from llamado.server.generate.constraints import Limits
from llamado.server.generate.controls import Controls
from llamado.server.generate.formats import Call, ChatFormat, CompletionsFormat, NativeFormat, completion_id
from llamado.server.generate.json_values import text
from llamado.server.generate.options import Options, bound_probabilities, make_requests, read_options
from llamado.server.generate.prompts import characters, encode, tokenize_prompts
from llamado.server.generate.streaming import Answer, EventStream, Format, Generation, Mailbox, json_response
from llamado.server.generate.threads import in_thread, off_loop, off_loop_chat, size_of
from llamado.server.loaded_model import Served
from llamado.server.state import ServerState
from llamado.server.switches import Switches
from llamado.text.grammar.source import GrammarError

if TYPE_CHECKING:
    from llamado.text.grammar.compiler import Constraint

MakeFormat = Callable[[Call], Format]


def too_long(n_tokens: int, n_ctx: int, *, least: bool = False) -> ApiError:
    """400 for a prompt that does not fit into the context; `least`: it has this many tokens or more."""
    known = f"at least {n_tokens}" if least else str(n_tokens)
    return ApiError(
        "exceed_context_size_error",
        f"request ({known} tokens) exceeds the available context size ({n_ctx} tokens), try increasing it",
        n_prompt_tokens=n_tokens,
        n_ctx=n_ctx,
    )


class Generator:
    """Turns a body into a response for one server."""

    def __init__(self, state: ServerState, mailbox: Mailbox) -> None:
        self._state = state
        self._mailbox = mailbox
        self.controls = Controls()

    @property
    def switches(self) -> Switches:
        return self._state.switches

    @property
    def served(self) -> Served:
        served = self._state.served
        if served is None:
            raise loading()
        return served

    async def complete(self, body: Mapping[str, Any], make: MakeFormat) -> Response:
        """Answer a body with a `prompt` in one of its shapes. Raises LlamadoError."""
        if "prompt" not in body:
            raise invalid("key 'prompt' not found")
        served, prompt = self.served, body["prompt"]
        most = self.switches.max_prompts

        def work() -> list[list[int]]:
            for item in prompt if isinstance(prompt, list) else [prompt]:
                self._check_length(characters(item))
            return tokenize_prompts(prompt, served.tokenizer, most=most)

        prompts = await off_loop(work, size_of(prompt))
        return await self.generate(await self._options(body), prompts, make)

    async def chat(self, body: Mapping[str, Any], make: MakeFormat) -> Response:
        """Answer a body of OpenAI's chat form. Raises LlamadoError."""
        conversation = await self.converse(body)
        chat, prepared = conversation.chat, conversation.prepared
        options = await self._options(chat.options)
        options.limits = conversation.limits(self.served.tokenizer)
        options.shown |= conversation.shown(stream=options.stream) | options.limits.shown()
        if options.limits.preserved:
            options.engine["preserved"] = options.limits.preserved
        if stops := [*chat.stops, *(stop for stop in prepared.stops if stop not in chat.stops)]:
            options.engine["stop"] = stops if chat.stops else [*self.served.defaults.stop, *stops]
        return await self.generate(options, [await self.tokenize(prepared.prompt)], make, conversation)

    async def converse(self, body: Mapping[str, Any]) -> Conversation:
        """Check a chat body and render its prompt. Raises LlamadoError."""
        switches, template = self.switches, self.served.template

        def work() -> Conversation:
            return prepare_chat(read_chat(body, switches), template)

        return await off_loop_chat(work, body)

    async def count(self, body: Mapping[str, Any]) -> int:
        """Tokens of a chat body's prompt. Raises LlamadoError."""
        return len(await self.tokenize((await self.converse(body)).prepared.prompt))

    async def tokenize(self, prompt: str) -> list[int]:
        """A prompt's tokens."""
        tokenizer = self.served.tokenizer

        def work() -> list[int]:
            self._check_length(len(prompt))
            return encode(prompt, tokenizer, add_special=True, parse_special=True)

        return await off_loop(work, len(prompt))

    def _check_length(self, n_characters: int) -> None:
        """Refuse a text that cannot fit into the context whatever its tokens: finding them may take a minute."""
        served = self.served
        longest, n_ctx = served.longest_token() if n_characters > served.info.n_ctx else 0, served.info.n_ctx
        if longest and n_characters > n_ctx * longest:
            raise too_long(n_characters // longest, n_ctx, least=True)

    async def _options(self, body: Mapping[str, Any]) -> Options:
        served = self.served

        def work() -> Options:
            return read_options(
                body,
                tokenizer=served.tokenizer,
                n_slots=served.n_slots,
                sse_ping_interval=self.switches.sse_ping_interval,
                verbose=self.switches.verbose,
            )

        return await off_loop(work, size_of([value for name, value in body.items() if name != "prompt"]))

    async def generate(
        self,
        options: Options,
        prompts: list[list[int]],
        make: MakeFormat,
        conversation: Conversation | None = None,
    ) -> Response:
        """Give checked options and tokens to the engine. Raises LlamadoError."""
        served = self.served
        n_ctx = served.info.n_ctx
        for tokens in prompts:
            if len(tokens) >= n_ctx:
                raise too_long(len(tokens), n_ctx)
        bound_probabilities(options, len(prompts), served.defaults.n_predict, n_ctx)
        constraint = await self._constraint(options.limits)
        size = 64 * len(prompts) * options.n + len(options.engine.get("logit_bias", ()))
        requests = await off_loop(lambda: make_requests(options, prompts, served.defaults, constraint), size)
        texts = [""] * len(prompts)
        if make is NativeFormat or options.verbose:
            texts = [await self._prompt_text(tokens) for tokens in prompts]
        call = Call(
            id=completion_id(),
            model=served.info.name,
            options=options,
            requests=requests,
            prompts=texts,
            conversation=conversation,
        )
        generation = Generation(self._mailbox, served.engine, requests, parts=options.stream)
        generation.start()
        if conversation is not None:
            self.controls.note(call.id, generation, constraint if conversation.chat.control else None)
        format = make(call)
        if options.stream:
            return EventStream(generation, format, ping_interval=options.sse_ping_interval)
        return Answer(generation, format)

    async def _constraint(self, limits: Limits) -> Constraint | None:
        """Compile what limits the answer; in a thread, for it may take seconds. Raises ApiError."""
        source, thinking, grammars = limits.source, limits.thinking, self.served.grammars
        if source is None:
            source = self.switches.grammar
        if limits.lazy and not limits.triggers:
            source = None  # it would never begin
        if source is None and thinking is None:
            return None
        if grammars is None:
            raise not_supported("This server's model does not generate")

        def compile() -> Constraint | None:
            constraint: Constraint | None = None
            if source is not None:
                constraint = grammars.compile(source, triggers=limits.triggers if limits.lazy else ())
            if thinking is None:
                return constraint
            return grammars.with_reasoning(
                constraint,
                start=thinking.start,
                end=thinking.ends[0],
                open=thinking.open,
                budget=thinking.budget,
                message=thinking.message,
            )

        try:
            return await in_thread(compile)
        except GrammarError as error:
            raise limits.blame(error) from None

    async def _prompt_text(self, tokens: list[int]) -> str:
        tokenizer = self.served.tokenizer
        return await off_loop(lambda: tokenizer.decode(tokens, special=True), 4 * len(tokens))


def completions_router(generator: Generator) -> APIRouter:
    """`/completion` and its relatives."""
    router = APIRouter(tags=["generate"])

    @router.post("/completion", **describe("completion"))
    @router.post("/completions", **describe("completion"))
    async def completion(request: Request) -> Response:
        return await generator.complete(await read_object(request), NativeFormat)

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
        refusal = generator.controls.end_reasoning(id)
        return json_response(orjson.dumps({"success": False, "message": refusal} if refusal else {"success": True}))

    @router.post("/v1/chat/completions/input_tokens", **describe("chat_count"))
    @router.post("/chat/completions/input_tokens", **describe("chat_count"))
    async def input_tokens(request: Request) -> Response:
        n_tokens = await generator.count(await read_object(request))
        return json_response(orjson.dumps({"input_tokens": n_tokens, "object": "response.input_tokens"}))

    @router.post("/v1/audio/transcriptions", include_in_schema=False)
    @router.post("/audio/transcriptions", include_in_schema=False)
    async def transcriptions() -> Response:
        raise not_supported("The current model does not support audio input.")

    @router.post("/apply-template", **describe("apply_template"))
    async def apply_template(request: Request) -> Response:
        conversation = await generator.converse(await read_object(request))
        return json_response(orjson.dumps({"prompt": conversation.prepared.prompt}))

    return router
