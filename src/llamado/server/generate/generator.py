"""The path from a body to its response: read in a thread, submitted to the engine, written in the format of an API."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from starlette.responses import Response

from llamado.server.generate.chat_request import chat_prompt, read_chat
from llamado.server.generate.completion_request import read_completion
from llamado.server.generate.prompts import tokenize_chat
from llamado.server.generate.receipt import model_origin
from llamado.server.generate.request import GenerationRequest
from llamado.server.generate.streaming import AnswerFormat, Generation, Mailbox, ReasoningControl, begin
from llamado.server.generate.submission import engine_requests
from llamado.server.generate.threads import in_thread, off_loop, off_loop_chat, size_of
from llamado.server.media.loader import MediaHold, MediaLoader
from llamado.server.media.parts import ChatMedia, take_media, take_prompt_media
from llamado.server.model import ServedModel
from llamado.server.state import ServerState
from llamado.server.switches import Switches
from llamado.text.dialects.dialect import StrictTools

FormatFactory = Callable[[GenerationRequest], AnswerFormat]


NOT_ENFORCED_HEADER = "Llamado-Not-Enforced"
"""The response header that lists the parts of the tools' schemas that are not enforced."""
_HEADER_LENGTH = 1000  # characters


def _header(parts: Sequence[str]) -> str:
    text = quote("; ".join(parts), safe=" !#$&'()*+,-./:;=?@[]^_`{|}~<>")
    return text if len(text) <= _HEADER_LENGTH else f"{text[:_HEADER_LENGTH]}..."


class Generator:
    """Generation for one server: turns bodies into responses."""

    def __init__(self, state: ServerState, mailbox: Mailbox) -> None:
        self._state = state
        self._mailbox = mailbox
        self._media = MediaLoader(state.switches)
        self._chats: weakref.WeakValueDictionary[str, Generation] = weakref.WeakValueDictionary()
        """Running chats by completion id."""

    @property
    def switches(self) -> Switches:
        return self._state.switches

    @property
    def served(self) -> ServedModel:
        return self._state.loaded()

    async def complete(
        self,
        body: Mapping[str, Any],
        make_format: FormatFactory,
        *,
        native: bool = False,
        prompt: Callable[[], list[int]] | None = None,
    ) -> Response:
        """Answer a completion body; `native` and `prompt`: see `read_completion`. Raises LlamadoError."""
        served = self.served
        body, with_media = take_prompt_media(body, served.media_kinds)
        with self._media.hold() as hold:
            for one in with_media:
                one.prepared = await self._media.load(one.references, served, hold)
            read = partial(read_completion, body, served, self.switches, native=native, prompt=prompt)
            return await self._submit(await off_loop(read, size_of(body)), served, make_format, hold)

    async def chat(
        self,
        body: Mapping[str, Any],
        make_format: FormatFactory,
        prefix: Sequence[int] = (),
        strict_tools: StrictTools | None = None,
        media: ChatMedia | None = None,
    ) -> Response:
        """Answer a body in OpenAI's chat form.

        `prefix`: tokens in front of its prompt; `strict_tools`: see Conversation; `media`: those of the body's marker
        parts, if the caller has made them. Raises LlamadoError.
        """
        served = self.served
        if media is None:
            body, media = take_media(body, served.media_kinds)
        with self._media.hold() as hold:
            media.prepared = await self._media.load(media.references, served, hold)
            read = partial(read_chat, body, served, self.switches, prefix, strict_tools, media)
            return await self._submit(await off_loop_chat(read, body), served, make_format, hold)

    async def render(self, body: Mapping[str, Any], strict_tools: StrictTools | None = None) -> str:
        """Return the prompt of a chat body as text, with the server's marker for each picture or sound.

        Raises LlamadoError.
        """
        body, _ = take_media(body, self.served.media_kinds, self.served.media_marker)
        return await self._render(body, strict_tools)

    async def _render(self, body: Mapping[str, Any], strict_tools: StrictTools | None) -> str:
        return await off_loop_chat(partial(chat_prompt, body, self.served, self.switches, strict_tools), body)

    async def count(self, body: Mapping[str, Any], strict_tools: StrictTools | None = None) -> int:
        """Return the number of tokens of a chat body's prompt. Raises LlamadoError."""
        served = self.served
        body, media = take_media(body, served.media_kinds)
        with self._media.hold() as hold:
            media.prepared = await self._media.load(media.references, served, hold)
            prompt = await self._render(body, strict_tools)
            found = await off_loop(partial(tokenize_chat, prompt, served, media), len(prompt))
        return len(found.tokens)

    async def _submit(
        self, request: GenerationRequest, served: ServedModel, make_format: FormatFactory, hold: MediaHold
    ) -> Response:
        """Submit a request to the engine, and return the response that waits for it and releases `hold` at its end.

        Raises LlamadoError.
        """
        if request.receipt:
            # Hashing a large file takes seconds the first time.
            origin = await in_thread(partial(model_origin, served.info), background=True)
            request = dataclasses.replace(request, origin=origin)
        requests = await engine_requests(request, served.grammars)
        constraint = requests[0].constraint
        control = constraint if request.control and isinstance(constraint, ReasoningControl) else None
        generation, response = await begin(
            self._mailbox,
            served.engine,
            requests,
            make_format(request),
            stream=request.stream,
            ping_interval=request.sse_ping_interval,
            control=control,
        )
        generation.on_close = hold.keep()
        if request.prepared is not None:
            self._chats[request.id] = generation
            if request.prepared.loosened:
                response.headers[NOT_ENFORCED_HEADER] = _header(request.prepared.loosened)
        return response

    def end_reasoning(self, id: str) -> str:
        """End the reasoning of a chat by its completion id; return "", or the reason if it cannot be ended."""
        generation = self._chats.get(id)
        return "no active completion for this id" if generation is None else generation.end_reasoning()
