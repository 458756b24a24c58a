"""A body's way to its answer: read beside the event loop, given to the engine, and written as one API wants it."""

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
from llamado.server.generate.streaming import AnswerFormat, EndsReasoning, Generation, Mailbox, begin
from llamado.server.generate.submission import engine_requests
from llamado.server.generate.threads import in_thread, off_loop, off_loop_chat, size_of
from llamado.server.model import Served
from llamado.server.state import ServerState
from llamado.server.switches import Switches
from llamado.text.dialects.dialect import StrictTools

MakeFormat = Callable[[GenerationRequest], AnswerFormat]


LOOSENED = "Llamado-Not-Enforced"
"""The header that names what is not enforced of the tools' schemas."""
_MOST_OF_HEADER = 1000  # characters


def _header(parts: Sequence[str]) -> str:
    text = quote("; ".join(parts), safe=" !#$&'()*+,-./:;=?@[]^_`{|}~<>")
    return text if len(text) <= _MOST_OF_HEADER else f"{text[:_MOST_OF_HEADER]}..."


class Generator:
    """Turns a body into a response for one server."""

    def __init__(self, state: ServerState, mailbox: Mailbox) -> None:
        self._state = state
        self._mailbox = mailbox
        self._chats: weakref.WeakValueDictionary[str, Generation] = weakref.WeakValueDictionary()
        """The running chats by their answers' ids."""

    @property
    def switches(self) -> Switches:
        return self._state.switches

    @property
    def served(self) -> Served:
        return self._state.loaded()

    async def complete(
        self,
        body: Mapping[str, Any],
        make: MakeFormat,
        *,
        native: bool = False,
        prompt: Callable[[], list[int]] | None = None,
    ) -> Response:
        """Answer a body with a `prompt` in one of its shapes (see `read_completion`). Raises LlamadoError."""
        served = self.served
        read = partial(read_completion, body, served, self.switches, native=native, prompt=prompt)
        return await self._answer(await off_loop(read, size_of(body)), served, make)

    async def chat(
        self,
        body: Mapping[str, Any],
        make: MakeFormat,
        before: Sequence[int] = (),
        strict_tools: StrictTools | None = None,
    ) -> Response:
        """Answer a body of OpenAI's chat form.

        `before`: tokens in front of its prompt; `strict_tools`: see Conversation. Raises LlamadoError.
        """
        served = self.served
        asked = await off_loop_chat(partial(read_chat, body, served, self.switches, before, strict_tools), body)
        return await self._answer(asked, served, make)

    async def render(self, body: Mapping[str, Any], strict_tools: StrictTools | None = None) -> str:
        """A chat body's prompt. Raises LlamadoError."""
        return await off_loop_chat(partial(chat_prompt, body, self.served, self.switches, strict_tools), body)

    async def count(self, body: Mapping[str, Any], strict_tools: StrictTools | None = None) -> int:
        """Tokens of a chat body's prompt. Raises LlamadoError."""
        prompt = await self.render(body, strict_tools)
        return len(await off_loop(partial(tokenize_chat, prompt, self.served), len(prompt)))

    async def _answer(self, asked: GenerationRequest, served: Served, make: MakeFormat) -> Response:
        """Give what is asked for to the engine. Raises LlamadoError."""
        if asked.receipt:
            # Of a large file it takes seconds, the first time.
            origin = await in_thread(partial(model_origin, served.info), patient=True)
            asked = dataclasses.replace(asked, origin=origin)
        requests = await engine_requests(asked, served.grammars)
        constraint = requests[0].constraint
        control = constraint if asked.control and isinstance(constraint, EndsReasoning) else None
        generation, response = begin(
            self._mailbox,
            served.engine,
            requests,
            make(asked),
            stream=asked.stream,
            ping_interval=asked.sse_ping_interval,
            control=control,
        )
        if asked.prepared is not None:
            self._chats[asked.id] = generation
            if asked.prepared.loosened:
                response.headers[LOOSENED] = _header(asked.prepared.loosened)
        return response

    def end_reasoning(self, id: str) -> str:
        """End the thoughts of a chat's answer; returns why not, "" where it is done."""
        generation = self._chats.get(id)
        return "no active completion for this id" if generation is None else generation.end_reasoning()
